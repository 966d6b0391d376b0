"""The command line: `main` dispatches, one module holds each subcommand."""
