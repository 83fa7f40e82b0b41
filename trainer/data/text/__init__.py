"""Text datasets: windows of the bytes of files, or of token files."""
