"""User-facing reports about a machine, a memory plan, GEMMs and packages. One module per report."""
