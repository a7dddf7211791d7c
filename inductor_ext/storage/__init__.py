"""Files that several processes share: atomic writes, digests, the artifact store."""
