"""`python -m services.cli`, the same as `forebay`."""

from services.cli.main import main

if __name__ == "__main__":
    main()
