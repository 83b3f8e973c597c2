"""A folder on a real file system that misbehaves on demand: it hangs, fails, is full, refuses.

    async with fault_fs(tmp_path) as fs:       # fs.folder: another folder's content, through FUSE
        await fs.tell("hang read")             # until "go"

Needs the right to mount; `can_mount` says whether it is there. Run as a program it is the server:
one process a mount, told what to do on its standard input. It speaks the kernel's FUSE protocol, as
far as files and folders need it.
"""

import asyncio
import ctypes
import errno
import os
import struct
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

_IN = struct.Struct("<IIQQIIIHxx")
_ROOT = 1
_LOOKUP, _FORGET, _GETATTR, _SETATTR = 1, 2, 3, 4
_MKDIR, _UNLINK, _RMDIR, _RENAME = 9, 10, 11, 12
_OPEN, _READ, _WRITE, _STATFS, _RELEASE, _FSYNC = 14, 15, 16, 17, 18, 20
_FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR = 25, 26, 27, 28, 29
_CREATE, _INTERRUPT, _DESTROY, _BATCH_FORGET, _FALLOCATE, _RENAME2 = 35, 36, 38, 42, 43, 45
_ASYNC_READ, _BIG_WRITES, _ASYNC_DIO, _MAX_PAGES = 1 << 0, 1 << 5, 1 << 15, 1 << 22
_FATTR_SIZE, _FATTR_MTIME = 1 << 3, 1 << 5


@dataclass(frozen=True)
class FaultFs:
    """A mounted one."""

    folder: Path
    _process: asyncio.subprocess.Process

    async def tell(self, command: str) -> None:
        """`hang OP`, `eio OP`, `enospc OP`, `refuse direct`, `refuse fallocate`, or `go`.

        OP is read, write or all. `go` ends all faults; what hangs goes on.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"{command}\n".encode())
        async with asyncio.timeout(10):
            assert await stdout.readline() == b"ok\n"


def can_mount() -> bool:
    """Whether this process may mount file systems."""
    return os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)


@asynccontextmanager
async def fault_fs(folder: Path) -> AsyncIterator[FaultFs]:
    """Mounts one over an empty folder of its own in `folder`."""
    source, mount = folder / "source", folder / "mount"
    source.mkdir()
    mount.mkdir()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        str(source),
        str(mount),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        async with asyncio.timeout(10):
            assert await process.stdout.readline() == b"ok\n"
        yield FaultFs(mount, process)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        async with asyncio.timeout(10):
            await process.wait()


class _Server:
    def __init__(self, source: str, mount: str) -> None:
        self._paths = {_ROOT: source}
        self._inodes = {source: _ROOT}
        self._next = _ROOT + 1
        self._mount = mount.encode()
        self._device = os.open("/dev/fuse", os.O_RDWR)
        self._libc = ctypes.CDLL(None, use_errno=True)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other"
        if self._libc.mount(b"faultfs", self._mount, b"fuse", 0, options.encode()):
            raise OSError(ctypes.get_errno(), "mount")
        self.faults: dict[str, str] = {}
        self.refused: set[str] = set()
        self.running = threading.Event()
        self.running.set()

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, (1 << 20) + 8192)
            except OSError as exc:
                if exc.errno == errno.ENODEV:
                    return
                raise
            _, op, unique, inode, *_ = _IN.unpack_from(request)
            body = request[_IN.size :]
            if op in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                continue
            kind = {_READ: "read", _WRITE: "write"}.get(op, "")
            call = self._bound(op, inode, body)
            if kind:
                threading.Thread(target=self._data, args=(unique, kind, call), daemon=True).start()
            else:
                self._answer(unique, call)

    def unmount(self) -> None:
        self.running.set()
        self._libc.umount2(self._mount, 2)

    def _data(self, unique: int, kind: str, call: Callable[[], bytes]) -> None:
        fault = self.faults.get(kind) or self.faults.get("all")
        if fault == "hang":
            self.running.wait()
        elif fault:
            code = {"eio": errno.EIO, "enospc": errno.ENOSPC}[fault]
            self._reply(unique, b"", code)
            return
        self._answer(unique, call)

    def _answer(self, unique: int, call: Callable[[], bytes]) -> None:
        try:
            self._reply(unique, call())
        except OSError as exc:
            self._reply(unique, b"", exc.errno or errno.EIO)

    def _reply(self, unique: int, body: bytes, error: int = 0) -> None:
        os.write(self._device, struct.pack("<IiQ", 16 + len(body), -error, unique) + body)

    def _bound(self, op: int, inode: int, body: bytes) -> Callable[[], bytes]:
        return lambda: self._call(op, inode, body)

    def _call(self, op: int, inode: int, body: bytes) -> bytes:
        path = self._paths.get(inode, "")
        if op == _INIT:
            flags = _ASYNC_READ | _BIG_WRITES | _ASYNC_DIO | _MAX_PAGES
            ahead = struct.unpack_from("<I", body, 8)[0]
            return struct.pack("<IIIIHHIIHH32x", 7, 31, ahead, flags, 64, 48, 1 << 20, 1, 256, 0)
        if op == _LOOKUP:
            return self._entry(os.path.join(path, _name(body)))
        if op == _GETATTR:
            return struct.pack("<QII", 0, 0, 0) + _attributes(inode, os.lstat(path))
        if op == _SETATTR:
            valid, _, size = struct.unpack_from("<I4xQQ", body)
            if valid & _FATTR_SIZE:
                os.truncate(path, size)
            if valid & _FATTR_MTIME:
                os.utime(path)
            return struct.pack("<QII", 0, 0, 0) + _attributes(inode, os.lstat(path))
        if op == _MKDIR:
            made = os.path.join(path, _name(body[8:]))
            os.mkdir(made)
            return self._entry(made)
        if op in (_UNLINK, _RMDIR):
            gone = os.path.join(path, _name(body))
            (os.unlink if op == _UNLINK else os.rmdir)(gone)
            self._inodes.pop(gone, None)
            return b""
        if op in (_RENAME, _RENAME2):
            parent = struct.unpack_from("<Q", body)[0]
            old, new, *_ = body[8 if op == _RENAME else 16 :].split(b"\0")
            self._moved(os.path.join(path, old.decode()), parent, new.decode())
            return b""
        if op == _OPEN:
            return self._open(path, struct.unpack_from("<I", body)[0])
        if op == _CREATE:
            made = os.path.join(path, _name(body[16:]))
            flags = struct.unpack_from("<I", body)[0]
            os.close(os.open(made, os.O_CREAT | os.O_RDWR | (flags & os.O_TRUNC), 0o600))
            return self._entry(made) + self._open(made, flags)
        if op == _READ:
            handle, offset, size = struct.unpack_from("<QQI", body)
            return os.pread(handle, size, offset)
        if op == _WRITE:
            handle, offset, size = struct.unpack_from("<QQI", body)
            return struct.pack("<I4x", os.pwrite(handle, body[40 : 40 + size], offset))
        if op == _FALLOCATE:
            if "fallocate" in self.refused:
                raise OSError(errno.EOPNOTSUPP, "")
            handle, offset, size = struct.unpack_from("<QQQ", body)
            os.posix_fallocate(handle, offset, size)
            return b""
        if op == _STATFS:
            s = os.statvfs(path)
            return struct.pack(
                "<QQQQQIII4x24x", s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree,
                s.f_bsize, s.f_namemax, s.f_frsize,
            )  # fmt: skip
        if op == _RELEASE:
            os.close(struct.unpack_from("<Q", body)[0])
            return b""
        if op == _OPENDIR:
            return bytes(16)
        if op == _READDIR:
            return self._list(path, *struct.unpack_from("<QI", body, 8))
        if op in (_FLUSH, _FSYNC, _RELEASEDIR, _DESTROY):
            return b""
        raise OSError(errno.ENOSYS, "")

    def _open(self, path: str, flags: int) -> bytes:
        if flags & os.O_DIRECT and "direct" in self.refused:
            raise OSError(errno.EINVAL, "")
        # Past the page cache: what is read shall have been asked of this process.
        return struct.pack("<QI4x", os.open(path, os.O_RDWR | (flags & os.O_TRUNC)), 1)

    def _entry(self, path: str) -> bytes:
        found = os.lstat(path)
        if path not in self._inodes:
            self._inodes[path] = self._next
            self._paths[self._next] = path
            self._next += 1
        inode = self._inodes[path]
        return struct.pack("<QQQQII", inode, 0, 0, 0, 0, 0) + _attributes(inode, found)

    def _moved(self, old: str, parent: int, name: str) -> None:
        new = os.path.join(self._paths[parent], name)
        os.rename(old, new)
        self._inodes.pop(new, None)
        inode = self._inodes.pop(old)
        self._inodes[new] = inode
        self._paths[inode] = new

    def _list(self, path: str, offset: int, size: int) -> bytes:
        listed = b""
        for index, name in enumerate(sorted(os.listdir(path)), 1):
            raw = name.encode()
            entry = struct.pack("<QQII", index, index, len(raw), 0) + raw
            entry += bytes(-len(entry) % 8)
            if index > offset:
                if len(listed) + len(entry) > size:
                    break
                listed += entry
        return listed


def _name(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode()


def _attributes(inode: int, found: os.stat_result) -> bytes:
    a, m, c = int(found.st_atime), int(found.st_mtime), int(found.st_ctime)
    return struct.pack(
        "<QQQQQQIIIIIIIIII", inode, found.st_size, found.st_blocks, a, m, c, 0, 0, 0,
        found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0,
    )  # fmt: skip


def _main(source: str, mount: str) -> None:
    server = _Server(source, mount)
    threading.Thread(target=server.serve, daemon=True).start()
    sys.stdout.write("ok\n")
    sys.stdout.flush()
    for line in sys.stdin:
        verb, _, what = line.strip().partition(" ")
        if verb == "go":
            server.faults.clear()
            server.refused.clear()
            server.running.set()
        elif verb == "refuse":
            server.refused.add(what)
        else:
            if verb == "hang":
                server.running.clear()
            server.faults[what] = verb
        sys.stdout.write("ok\n")
        sys.stdout.flush()
    server.unmount()


if __name__ == "__main__":
    _main(*sys.argv[1:])
