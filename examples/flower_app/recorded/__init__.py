"""A Flower app with a recorder on the server and, if asked for, a defense on the clients."""
