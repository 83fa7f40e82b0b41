"""Text as windows of tokens: in memory, streamed, or from token files."""
