//! Disks that NBD clients reach over TCP alone, as commands name them: HOST:PORT, and
//! HOST:PORT/NAME where a process serves several.
//!
//! Promises: one spelling for each name, so that a server and `ringdisk ctl` find the same control
//! socket; a path is never taken for an address. Plain values.

use std::path::{Path, PathBuf};

/// A host that only programs of this machine reach: the one of an address without a host.
const LOOPBACK: &str = "127.0.0.1";

/// The name of a disk that is served at an address, for its control socket: not an absolute path,
/// as those of other disks are.
///
/// * `target`: HOST:PORT, [HOST]:PORT, :PORT or PORT, each with or without /NAME.
///
/// `None`: it is no such address.
pub fn name_of(target: &Path) -> Option<PathBuf> {
    let text = target.to_str()?;
    let (address, name) = match text.split_once('/') {
        Some((address, name)) if !name.is_empty() => (address, Some(name)),
        Some(_) => return None,
        None => (text, None),
    };
    let (host, port) = address.rsplit_once(':').unwrap_or((LOOPBACK, address));
    let port: u16 = port.parse().ok().filter(|port| *port > 0)?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host = match bare {
        Some(bare) => bare,
        None if host.contains(':') => return None,
        None => host,
    };
    let address = match host {
        "" => format!("{LOOPBACK}:{port}"),
        host if host.contains(':') => format!("[{host}]:{port}"),
        host => format!("{host}:{port}"),
    };
    Some(name.map_or_else(|| PathBuf::from(&address), |name| Path::new(&address).join(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Option<String> {
        name_of(Path::new(text)).map(|name| name.display().to_string())
    }

    #[test]
    fn each_spelling_of_an_address_is_one_name() {
        for spelling in ["127.0.0.1:10809", ":10809", "10809", "[127.0.0.1]:10809"] {
            assert_eq!(name(spelling).as_deref(), Some("127.0.0.1:10809"), "{spelling}");
        }
        assert_eq!(name("[::1]:1/a").as_deref(), Some("[::1]:1/a"));
        assert_eq!(name("host:1/a/b").as_deref(), Some("host:1/a/b"));
    }

    #[test]
    fn paths_and_halves_of_addresses_are_none() {
        for text in ["", "disk", "/run/a:1", "./a:1", "host:", "host:0", "::1:1", "a:1/", "a:65536"]
        {
            assert_eq!(name(text), None, "{text}");
        }
    }
}
