"""Selection methods, one file each: which pages a query reads."""
