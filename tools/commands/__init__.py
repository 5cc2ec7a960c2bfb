"""One file per command. Heavy packages are imported inside the functions, so that help is quick."""
