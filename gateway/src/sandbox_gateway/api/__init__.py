"""HTTP: access/ authorises requests, native/ and forkd/ translate them for the engine, data_plane/ is a proxy."""
