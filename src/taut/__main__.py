"""The `taut` command: the table of commands, nothing else."""

import argparse
import sys

from taut.cli import info, report, train

COMMANDS = {"train": train, "report": report, "info": info}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="taut", description="Train Transformers without slack.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, command in COMMANDS.items():
        summary = (command.__doc__ or "").partition(": ")[2]
        command.add_arguments(commands.add_parser(name, help=summary, description=summary))
    args = parser.parse_args(arguments)
    try:
        return COMMANDS[args.command].run(args)
    except ValueError as error:
        print(f"taut {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
