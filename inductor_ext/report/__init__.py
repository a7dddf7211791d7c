"""What the extension tells people: about a machine, a plan, an artifact. One module a command."""
