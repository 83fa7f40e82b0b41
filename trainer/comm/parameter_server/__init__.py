"""Parameters on servers: which rows are where, and how workers pull values and push gradients."""
