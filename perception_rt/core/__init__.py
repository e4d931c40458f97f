"""The pure logic: no I/O, no clock reads, standard library and numpy only."""
