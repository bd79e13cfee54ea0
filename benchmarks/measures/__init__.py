"""One module per subcommand; each has `run(bench) -> list[Row]`."""
