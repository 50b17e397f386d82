"""Run moetool's command line by `python -m moetool`."""

from moetool.cli import main

if __name__ == "__main__":
    main()
