"""One store: blobs by digest, entries that name them, and what keeps them while they are used."""
