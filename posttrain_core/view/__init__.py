"""A local web page over a store: runs, their charts, their rollouts. Reads only, works offline."""
