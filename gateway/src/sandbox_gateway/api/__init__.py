"""The HTTP API: access/ authorises requests, native/ and forkd/ translate them, data_plane/ forwards them."""
