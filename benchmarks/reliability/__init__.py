"""What holds over many compiles and requests, and when the machine fails."""
