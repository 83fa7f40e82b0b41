"""All-reduces: algorithms, what runs them, and their timeline; parameter servers; a check of the network."""
