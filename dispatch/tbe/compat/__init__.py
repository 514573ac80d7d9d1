"""Drop-ins for other libraries' embedding modules, one package each."""
