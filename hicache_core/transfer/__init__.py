"""Movement: planning, ways to move, staging, and the engine that orders them."""
