"""Expected results computed in an independent way, and worlds in which components are tried."""
