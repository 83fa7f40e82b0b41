"""Parameters that live on servers: which rows lie where, and how workers pull values and push gradients."""
