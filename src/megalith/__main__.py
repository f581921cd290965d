"""`python -m megalith`."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from megalith.cli.main import app

    app()


if __name__ == "__main__":
    main()
