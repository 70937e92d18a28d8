"""When a lane saves: what its policy says, agreed on by all processes."""
