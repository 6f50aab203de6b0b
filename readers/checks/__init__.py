"""The checks that verification consists of, each of one kind of object. None raises: they report, and go on."""
