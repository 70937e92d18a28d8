"""How Sessions lie on connections, for both sides: frames, TLS, and the door of a port."""
