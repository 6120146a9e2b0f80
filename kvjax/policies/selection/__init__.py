"""Which pages a query reads: a file a method."""
