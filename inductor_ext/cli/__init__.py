"""The command line: `main` dispatches to the commands, one module per command."""
