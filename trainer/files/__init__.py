"""Files written whole or not at all, new directories, and untrusted files read with checks."""
