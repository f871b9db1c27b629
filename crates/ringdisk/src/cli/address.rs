//! Addresses where clients connect.
//!
//! Promises: pure; nothing is looked up.

pub(crate) use ringdisk_daemon::sockets::Address;

/// A host that only programs of this machine reach.
const LOOPBACK: &str = "127.0.0.1";

/// An address where a socket is made.
pub(crate) fn parse_new_address(text: &str) -> Result<Address, String> {
    match parse_address(text) {
        Ok(Address::Given(_)) => {
            Err(String::from("a socket is made here: fd:N is for `serve --nbd`"))
        }
        Err(_) | Ok(Address::Tcp { port: 0, .. }) => Err(String::from(
            "write unix:PATH, a path with a slash, HOST:PORT, or PORT (1 to 65535)",
        )),
        address => address,
    }
}

pub(crate) fn parse_address(text: &str) -> Result<Address, String> {
    let wrong = || {
        String::from(
            "write unix:PATH, a path with a slash, HOST:PORT, PORT (0: a free one), or fd:N",
        )
    };
    if let Some(path) = text.strip_prefix("unix:") {
        return if path.is_empty() { Err(wrong()) } else { Ok(Address::Unix(path.into())) };
    }
    if let Some(name) = text.strip_prefix("fd:") {
        return if name.is_empty() { Err(wrong()) } else { Ok(Address::Given(name.to_owned())) };
    }
    if text.contains('/') {
        return Ok(Address::Unix(text.into()));
    }
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) => (host, port),
        None => (LOOPBACK, text),
    };
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host = match bare {
        Some(host) => host,
        // Where an address of IPv6 ends, and whether a port follows, only brackets tell.
        None if host.contains(':') => return Err(wrong()),
        None => host,
    };
    let host = if host.is_empty() { LOOPBACK } else { host };
    match port.parse() {
        Ok(port) => Ok(Address::Tcp { host: host.to_owned(), port }),
        Err(_) => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> Result<Address, String> {
        Ok(Address::Tcp { host: host.to_owned(), port })
    }

    #[test]
    fn addresses_are_paths_or_ports() {
        assert_eq!(parse_address("unix:a.sock"), Ok(Address::Unix("a.sock".into())));
        assert_eq!(parse_address("/run/a:1"), Ok(Address::Unix("/run/a:1".into())));
        assert_eq!(parse_address("fd:3"), Ok(Address::Given("3".into())));
        assert_eq!(parse_address("fd:nbd").unwrap().to_string(), "fd:nbd");
        assert_eq!(parse_address("10809"), tcp("127.0.0.1", 10809));
        assert_eq!(parse_address(":10809"), tcp("127.0.0.1", 10809));
        assert_eq!(parse_address("localhost:1"), tcp("localhost", 1));
        assert_eq!(parse_address("[::1]:10809"), tcp("::1", 10809));
        assert_eq!(parse_address("[::1]:10809").unwrap().to_string(), "[::1]:10809");
        assert_eq!(parse_address("0"), tcp("127.0.0.1", 0));
        assert!(parse_new_address("0").is_err());
        for wrong in ["", "unix:", "fd:", "host", "host:", "-1", "65536", "::1:10809", "a:b:1"] {
            assert!(parse_address(wrong).is_err(), "{wrong}");
        }
    }
}
