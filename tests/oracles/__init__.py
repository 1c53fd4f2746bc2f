"""llmc's rules of other servers against these servers' own code (`make oracles`)."""
