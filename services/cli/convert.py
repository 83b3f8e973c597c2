"""Turns a GGUF file into a model folder: `python -m services.cli.convert GGUF FOLDER`.

A program of its own, so that torch's memory goes with it. Writes one JSON object a line to stdout:
{"stage": words, "share": work done before that stage, 0 to 1}.
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path

WEIGHTS = "model.safetensors"


def _say(stage: str, share: float) -> None:
    print(json.dumps({"stage": stage, "share": share}), flush=True)


def convert(source: Path, folder: Path) -> None:
    """Writes weights (bfloat16), configuration, tokenizer, chat template, generation defaults."""
    _say("loading torch and transformers", 0.0)
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    _say("reading the tokenizer", 0.15)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    _say("reading and dequantizing the weights", 0.3)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    _say("writing the model", 0.95)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if not tokenizer.chat_template:
        raise ValueError(f"{source.name} has no chat template")
    for file in folder.iterdir():  # safetensors writes for this user alone
        file.chmod(0o644)


def main() -> None:
    """Converts argv[1] into the folder argv[2]."""
    # Nothing here may go looking for a hub.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
