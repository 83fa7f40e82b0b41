"""Files written whole or not at all, new directories, and what others wrote, read without trust."""
