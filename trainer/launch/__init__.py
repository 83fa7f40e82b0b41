"""How the processes of a run come to be, and how they end. Imports no torch."""
