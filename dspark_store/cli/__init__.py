"""The commands: one way in, one table of exit codes, and a module per command.

In come words of a command line; out come an exit code, lines on stdout, and one line per error on stderr. A command
adds its arguments without importing torch, and calls a room below; `terminal` has what it prints with, and the bar of
a room's progress.
Read `main` first, then `options`, then any command. A new command is a module with `add_arguments` and `run`, and a
line in `main`'s table.
"""
