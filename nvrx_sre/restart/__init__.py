"""In-process restart on the rank's side: interrupt, abort, teardown."""
