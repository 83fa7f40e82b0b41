"""Text as windows of tokens: bytes of files, or token files."""
