//! Names of NBD exports: URIs, and the older form of QEMU.
//!
//! Promises: pure; nothing is connected or looked up here, and a name that is not understood is
//! refused with the reason.
//! Source: the NBD URI specification (doc/uri.md of the protocol); QEMU's documentation of its
//! driver `nbd`.

use std::ffi::OsString;
use std::fmt;
use std::net::ToSocketAddrs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use ringdisk_nbd_protocol::numbers::{NAME_BYTES_MAX, context};

use crate::endpoint::NbdEndpoint;

/// Port of servers that name none.
pub const NBD_PORT: u16 = 10809;
/// Longest path of a Unix socket (`sun_path` less its final zero), bytes.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum NbdServer {
    /// A Unix socket.
    Unix(PathBuf),
    /// A host (name or address, without brackets) and a port.
    Tcp(String, u16),
}

impl NbdServer {
    /// Where TCP addresses are compared by their host alone: `None` for a Unix socket.
    pub fn host(&self) -> Option<&str> {
        match self {
            NbdServer::Unix(_) => None,
            NbdServer::Tcp(host, _) => Some(host),
        }
    }

    /// Where to connect, the endpoint to try first in front. Blocks for the look-up of a name.
    ///
    /// Errors: no such host.
    pub fn look_up(&self) -> std::io::Result<Vec<NbdEndpoint>> {
        match self {
            NbdServer::Unix(path) => Ok(vec![NbdEndpoint::Unix(std::path::absolute(path)?)]),
            NbdServer::Tcp(host, port) => {
                let found = (host.as_str(), *port).to_socket_addrs()?;
                Ok(found.map(NbdEndpoint::Tcp).collect())
            }
        }
    }
}

impl fmt::Display for NbdServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NbdServer::Unix(path) => write!(f, "unix:{}", path.display()),
            NbdServer::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            NbdServer::Tcp(host, port) => write!(f, "{host}:{port}"),
        }
    }
}

/// How a client of a server encrypts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NbdTls {
    /// Directory of certificates in QEMU's layout (`ca-cert.pem`; `client-cert.pem` with
    /// `client-key.pem` where the server wants one).
    pub certificates: PathBuf,
    /// The name that the server's certificate has to have; `None`: that of the host, or
    /// `localhost` for a Unix socket.
    pub hostname: Option<String>,
}

/// An export of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NbdAddress {
    /// The server.
    pub server: NbdServer,
    /// Name of the export; empty: the default one.
    pub export: Vec<u8>,
    /// TLS is used; a server without it is refused. `None`: nothing is encrypted.
    pub tls: Option<NbdTls>,
    /// The context `qemu:dirty-bitmap:NAME` that is looked at in place of holes
    /// ([`NbdAddress::with_dirty_bitmap`]).
    pub dirty_bitmap: Option<String>,
}

/// The reason why a name is no address of an NBD export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadAddress(pub String);

impl fmt::Display for BadAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadAddress {}

fn bad<T>(why: impl Into<String>) -> Result<T, BadAddress> {
    Err(BadAddress(why.into()))
}

impl NbdAddress {
    /// Whether a name of an image begins as one of an NBD export does.
    pub fn is_meant(name: &[u8]) -> bool {
        let Some(at) = name.iter().position(|byte| *byte == b':' || *byte == b'/') else {
            return false;
        };
        let scheme = name.get(..at).unwrap_or_default();
        let schemes: [&[u8]; 8] = [
            b"nbd",
            b"nbds",
            b"nbd+unix",
            b"nbds+unix",
            b"nbd+tcp",
            b"nbds+tcp",
            b"nbd+vsock",
            b"nbds+vsock",
        ];
        name.get(at) == Some(&b':') && schemes.contains(&scheme)
    }

    /// Parses a name that [`NbdAddress::is_meant`].
    ///
    /// Errors: other transports, parts that are missing, malformed or unknown.
    pub fn parse(name: &[u8]) -> Result<NbdAddress, BadAddress> {
        let Ok(text) = std::str::from_utf8(name) else { return bad("the name is not UTF-8") };
        let Some((scheme, rest)) = text.split_once(':') else { return bad("no NBD address") };
        let Some(rest) = rest.strip_prefix("//") else {
            return if scheme == "nbd" { legacy(rest) } else { bad("the URI has no `//`") };
        };
        let (rest, fragment) = rest.split_once('#').unwrap_or((rest, ""));
        if !fragment.is_empty() {
            return bad("the URI has a fragment (`#…`)");
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = match rest.find('/') {
            Some(at) => rest.split_at(at),
            None => (rest, ""),
        };
        let export = decoded(path.strip_prefix('/').unwrap_or(path))?;
        let Query { socket, certificates, mut hostname, dirty_bitmap } = Query::parse(query)?;
        let (transport, is_encrypted) = match scheme.strip_prefix("nbds") {
            Some(rest) => (rest, true),
            None => (scheme.strip_prefix("nbd").unwrap_or(scheme), false),
        };
        let mut authority = authority;
        if is_encrypted && transport == "+unix" && !authority.is_empty() {
            // As libnbd's and QEMU's users write it.
            let host = Some(without_user(authority)).filter(|host| !host.is_empty());
            hostname = hostname.or(host.map(str::to_owned));
            authority = "";
        }
        let tls = match (is_encrypted, certificates) {
            (true, Some(certificates)) => Some(NbdTls { certificates, hostname }),
            (true, None) => return bad(NO_CERTIFICATES),
            (false, None) if hostname.is_none() => None,
            (false, _) => return bad("`tls-…` of the URI belongs to `nbds://`, which encrypts"),
        };
        let server = match (transport, socket) {
            ("+unix", Some(_)) if !authority.is_empty() => {
                return bad("a Unix socket has no host: `nbd+unix:///NAME?socket=PATH`");
            }
            ("+unix", Some(path)) => unix(path)?,
            ("+unix", None) => return bad("`nbd+unix:///NAME` needs `?socket=PATH`"),
            ("" | "+tcp", None) => tcp(authority)?,
            ("" | "+tcp", Some(_)) => {
                return bad("`socket=` belongs to `nbd+unix:///NAME?socket=PATH`");
            }
            _ => return bad(format!("the transport of `{scheme}:` is not supported")),
        };
        let address = NbdAddress { tls, ..NbdAddress::new(server, export)? };
        match dirty_bitmap {
            Some(bitmap) => address.with_dirty_bitmap(&bitmap),
            None => Ok(address),
        }
    }

    /// As QEMU's `x-dirty-bitmap`: the export is only read, and what a map of it shows is a bitmap
    /// of the server ([`crate::Storage::dirty`]).
    ///
    /// * `name`: the name of the context, `qemu:dirty-bitmap:NAME`; `base:allocation` is what there
    ///   is without.
    ///
    /// Errors: another context; a name that is too long or has a zero byte.
    pub fn with_dirty_bitmap(mut self, name: &str) -> Result<NbdAddress, BadAddress> {
        if name == context::ALLOCATION {
            return Ok(self);
        }
        let bitmap = name.strip_prefix(context::DIRTY_BITMAP_PREFIX).unwrap_or_default();
        if bitmap.is_empty() || name.len() > NAME_BYTES_MAX || name.contains('\0') {
            return bad(format!(
                "`x-dirty-bitmap` is '{}', and has to be `qemu:dirty-bitmap:NAME`",
                name.escape_debug()
            ));
        }
        self.dirty_bitmap = Some(name.to_owned());
        Ok(self)
    }

    /// * `export`: at most 4096 bytes, without zero bytes.
    ///
    /// Errors: another name.
    pub fn new(server: NbdServer, export: Vec<u8>) -> Result<NbdAddress, BadAddress> {
        if export.len() > NAME_BYTES_MAX {
            return bad(format!("the export's name is longer than {NAME_BYTES_MAX} bytes"));
        }
        if export.contains(&0) {
            return bad("the export's name contains a zero byte");
        }
        Ok(NbdAddress { server, export, tls: None, dirty_bitmap: None })
    }

    /// The export of a server on a Unix socket.
    ///
    /// Errors: a path that no socket can have; as [`NbdAddress::new`].
    pub fn unix(path: Vec<u8>, export: Vec<u8>) -> Result<NbdAddress, BadAddress> {
        NbdAddress::new(unix(path)?, export)
    }
}

impl fmt::Display for NbdAddress {
    /// The URI.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let export = encoded(&self.export);
        let scheme = if self.tls.is_some() { "nbds" } else { "nbd" };
        match &self.server {
            NbdServer::Unix(path) => {
                let socket = encoded(path.as_os_str().as_bytes());
                write!(f, "{scheme}+unix:///{export}?socket={socket}")?;
            }
            NbdServer::Tcp(host, NBD_PORT) if host.contains(':') => {
                write!(f, "{scheme}://[{host}]/{export}")?;
            }
            NbdServer::Tcp(host, NBD_PORT) => write!(f, "{scheme}://{host}/{export}")?,
            server => write!(f, "{scheme}://{server}/{export}")?,
        }
        let mut sign = if self.server.host().is_some() { '?' } else { '&' };
        if let Some(NbdTls { certificates, hostname }) = &self.tls {
            let directory = encoded(certificates.as_os_str().as_bytes());
            write!(f, "{sign}tls-certificates={directory}")?;
            sign = '&';
            if let Some(name) = hostname {
                write!(f, "&tls-hostname={}", encoded(name.as_bytes()))?;
            }
        }
        match &self.dirty_bitmap {
            Some(name) => write!(f, "{sign}{DIRTY_BITMAP}={}", encoded(name.as_bytes())),
            None => Ok(()),
        }
    }
}

fn unix(path: Vec<u8>) -> Result<NbdServer, BadAddress> {
    match path.len() {
        0 => bad("the path of the socket is empty"),
        len if len > SOCKET_PATH_BYTES_MAX => {
            bad(format!("the path of the socket is longer than {SOCKET_PATH_BYTES_MAX} bytes"))
        }
        _ if path.contains(&0) => bad("the path of the socket contains a zero byte"),
        _ => Ok(NbdServer::Unix(PathBuf::from(OsString::from_vec(path)))),
    }
}

/// What is behind `user@`. A user, and a password, mean nothing to a server of exports, and are in
/// no name that is shown.
fn without_user(authority: &str) -> &str {
    authority.rsplit_once('@').map_or(authority, |(_, address)| address)
}

/// `[user@]host[:port]`.
fn tcp(authority: &str) -> Result<NbdServer, BadAddress> {
    let address = without_user(authority);
    let (host, port) = match address.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((host, "")) => (host, None),
            Some((host, rest)) if rest.starts_with(':') => (host, rest.get(1..)),
            _ => return bad("the brackets of the address do not close"),
        },
        None => match address.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (address, None),
        },
    };
    let host = String::from_utf8(decoded(host)?).unwrap_or_default();
    host_and_port(&host, port.filter(|port| !port.is_empty()))
}

fn host_and_port(host: &str, port: Option<&str>) -> Result<NbdServer, BadAddress> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._:%".contains(c);
    if host.is_empty() || !host.chars().all(is_plain) {
        return bad("the host is missing or malformed");
    }
    let port = match port {
        None => NBD_PORT,
        Some(port) => match port.parse() {
            Ok(0) | Err(_) => return bad("the port is no number from 1 to 65535"),
            Ok(port) => port,
        },
    };
    Ok(NbdServer::Tcp(host.to_owned(), port))
}

/// `unix:PATH[:exportname=NAME]` and `HOST:PORT[:exportname=NAME]`, behind `nbd:`.
fn legacy(text: &str) -> Result<NbdAddress, BadAddress> {
    let (server, export) = text.split_once(":exportname=").unwrap_or((text, ""));
    let server = match server.strip_prefix("unix:") {
        Some(path) => unix(path.as_bytes().to_vec())?,
        None => match server.rsplit_once(':') {
            Some((host, port)) => {
                let host = host.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
                let host = host.unwrap_or(server.rsplit_once(':').map_or("", |(host, _)| host));
                host_and_port(host, Some(port))?
            }
            None => return bad("`nbd:HOST:PORT` needs a port"),
        },
    };
    NbdAddress::new(server, export.as_bytes().to_vec())
}

/// Why an encrypted address without certificates is refused.
const NO_CERTIFICATES: &str = "TLS needs the authority of the server's certificate: add \
     `?tls-certificates=DIR` (or `&tls-certificates=DIR`), where DIR has ca-cert.pem, and \
     client-cert.pem with client-key.pem if the server wants a certificate";

/// The key that names a bitmap, also in a `json:` name, where it is QEMU's.
const DIRTY_BITMAP: &str = "x-dirty-bitmap";

/// What a URI has behind its question mark.
#[derive(Default)]
struct Query {
    dirty_bitmap: Option<String>,
    socket: Option<Vec<u8>>,
    certificates: Option<PathBuf>,
    hostname: Option<String>,
}

impl Query {
    fn parse(query: &str) -> Result<Query, BadAddress> {
        let mut all = Query::default();
        for pair in query.split(['&', ';']).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = decoded(value)?;
            match key {
                "socket" if all.socket.is_none() => all.socket = Some(value),
                "tls-certificates" if all.certificates.is_none() && !value.is_empty() => {
                    all.certificates = Some(OsString::from_vec(value).into());
                }
                "tls-hostname" if all.hostname.is_none() && !value.is_empty() => {
                    let name = String::from_utf8(value).ok();
                    let name = name.ok_or(BadAddress(String::from("`tls-hostname` is no name")))?;
                    all.hostname = Some(name);
                }
                DIRTY_BITMAP if all.dirty_bitmap.is_none() => {
                    let name = String::from_utf8(value).ok();
                    let name = name.ok_or(BadAddress(format!("`{DIRTY_BITMAP}` is not UTF-8")))?;
                    all.dirty_bitmap = Some(name);
                }
                "tls-psk-file" | "tls-username" => {
                    return bad(format!(
                        "`{key}` of the URI is for keys that are shared beforehand, which are not \
                         supported: use certificates (`tls-certificates=DIR`)"
                    ));
                }
                key => {
                    return bad(format!(
                        "`{key}` of the URI is not supported, is empty, or is given twice"
                    ));
                }
            }
        }
        Ok(all)
    }
}

/// Without percent signs.
fn decoded(text: &str) -> Result<Vec<u8>, BadAddress> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let mut digit = || bytes.next().and_then(|byte| char::from(byte).to_digit(16));
        let (Some(high), Some(low)) = (digit(), digit()) else {
            return bad("a `%` of the URI is not followed by two hexadecimal digits");
        };
        out.push(u8::try_from(high * 16 + low).unwrap_or_default());
    }
    Ok(out)
}

fn encoded(bytes: &[u8]) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/:@".contains(&byte);
    let each = |byte: &u8| match *byte {
        byte if plain(byte) => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    bytes.iter().map(each).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &str) -> NbdAddress {
        assert!(NbdAddress::is_meant(name.as_bytes()), "{name}");
        NbdAddress::parse(name.as_bytes()).expect(name)
    }

    #[test]
    #[expect(clippy::too_many_lines, reason = "a table of addresses")]
    fn addresses_are_parsed_and_shown_as_uris() {
        let tcp = |host: &str, port, export: &[u8]| NbdAddress {
            server: NbdServer::Tcp(host.to_owned(), port),
            export: export.to_vec(),
            tls: None,
            dirty_bitmap: None,
        };
        let unix = |path: &str, export: &[u8]| NbdAddress {
            server: NbdServer::Unix(path.into()),
            export: export.to_vec(),
            tls: None,
            dirty_bitmap: None,
        };
        let dirty = |address: NbdAddress| {
            address.with_dirty_bitmap("qemu:dirty-bitmap:b 0").expect("a bitmap")
        };
        let with = |address: NbdAddress, hostname: Option<&str>| NbdAddress {
            tls: Some(NbdTls {
                certificates: "/p q".into(),
                hostname: hostname.map(ToOwned::to_owned),
            }),
            ..address
        };
        for (name, address, uri) in [
            ("nbd://host", tcp("host", 10809, b""), "nbd://host/"),
            ("nbd://host:1234/a%20b", tcp("host", 1234, b"a b"), "nbd://host:1234/a%20b"),
            ("nbd://[::1]:9/x/y", tcp("::1", 9, b"x/y"), "nbd://[::1]:9/x/y"),
            ("nbd://[::1]", tcp("::1", 10809, b""), "nbd://[::1]/"),
            ("nbd://me@host/x", tcp("host", 10809, b"x"), "nbd://host/x"),
            ("nbd+unix:///?socket=/a", unix("/a", b""), "nbd+unix:///?socket=/a"),
            ("nbd+unix:///n?socket=s%3f", unix("s?", b"n"), "nbd+unix:///n?socket=s%3F"),
            ("nbd:unix:/a:exportname=b", unix("/a", b"b"), "nbd+unix:///b?socket=/a"),
            ("nbd:host:5", tcp("host", 5, b""), "nbd://host:5/"),
            ("nbd:[::1]:5:exportname=q", tcp("::1", 5, b"q"), "nbd://[::1]:5/q"),
            (
                "nbds://host/x?tls-certificates=/p%20q",
                with(tcp("host", 10809, b"x"), None),
                "nbds://host/x?tls-certificates=/p%20q",
            ),
            (
                "nbds+unix://name/x?socket=/a&tls-certificates=/p%20q",
                with(unix("/a", b"x"), Some("name")),
                "nbds+unix:///x?socket=/a&tls-certificates=/p%20q&tls-hostname=name",
            ),
            (
                "nbds+unix://me:p@w@name/x?socket=/a&tls-certificates=/p%20q",
                with(unix("/a", b"x"), Some("name")),
                "nbds+unix:///x?socket=/a&tls-certificates=/p%20q&tls-hostname=name",
            ),
            (
                "nbds+unix://me@/x?socket=/a&tls-certificates=/p%20q",
                with(unix("/a", b"x"), None),
                "nbds+unix:///x?socket=/a&tls-certificates=/p%20q",
            ),
            (
                "nbd://host/x?x-dirty-bitmap=qemu:dirty-bitmap:b%200",
                dirty(tcp("host", 10809, b"x")),
                "nbd://host/x?x-dirty-bitmap=qemu:dirty-bitmap:b%200",
            ),
            (
                "nbd+unix:///?x-dirty-bitmap=qemu:dirty-bitmap:b%200&socket=/a",
                dirty(unix("/a", b"")),
                "nbd+unix:///?socket=/a&x-dirty-bitmap=qemu:dirty-bitmap:b%200",
            ),
            (
                "nbds://h/?x-dirty-bitmap=qemu:dirty-bitmap:b%200&tls-certificates=/p%20q",
                dirty(with(tcp("h", 10809, b""), None)),
                "nbds://h/?tls-certificates=/p%20q&x-dirty-bitmap=qemu:dirty-bitmap:b%200",
            ),
            (
                "nbd://host/x?x-dirty-bitmap=base:allocation",
                tcp("host", 10809, b"x"),
                "nbd://host/x",
            ),
            (
                "nbds+tcp://[::1]/?tls-hostname=n&tls-certificates=/p%20q",
                with(tcp("::1", 10809, b""), Some("n")),
                "nbds://[::1]/?tls-certificates=/p%20q&tls-hostname=n",
            ),
        ] {
            assert_eq!(parse(name), address, "{name}");
            assert_eq!(address.to_string(), uri, "{name}");
            assert_eq!(parse(uri), address, "{uri}");
        }
    }

    #[test]
    fn what_is_malformed_is_refused_with_a_reason() {
        for (name, why) in [
            ("nbds://host/x", "tls-certificates=DIR"),
            ("nbds+unix:///x?socket=/a", "tls-certificates=DIR"),
            ("nbds://host/x?tls-certificates=", "empty"),
            ("nbds://host/x?tls-psk-file=a", "not supported: use certificates"),
            ("nbd://host/x?tls-certificates=/a", "belongs to `nbds://`"),
            ("nbd://host/x?tls-hostname=a", "belongs to `nbds://`"),
            ("nbds+vsock:///x?tls-certificates=/a", "transport"),
            ("nbd://host/?x-dirty-bitmap=b0", "has to be `qemu:dirty-bitmap:NAME`"),
            ("nbd://host/?x-dirty-bitmap=qemu:dirty-bitmap:", "has to be"),
            ("nbd://host/?x-dirty-bitmap=qemu:allocation-depth", "has to be"),
            ("nbd://host/?x-dirty-bitmap=a&x-dirty-bitmap=a", "twice"),
            ("nbd+vsock:///x", "transport"),
            ("nbd://", "host is missing"),
            ("nbd:///x", "host is missing"),
            ("nbd://host:0/", "port"),
            ("nbd://host:70000/", "port"),
            ("nbd://ho st/", "host"),
            ("nbd://[::1/", "brackets"),
            ("nbd://host/%zz", "hexadecimal"),
            ("nbd://host/%00", "zero byte"),
            ("nbd://host/?socket=/a", "socket="),
            ("nbd://host/?x=y", "`x`"),
            ("nbd+unix:///x", "?socket=PATH"),
            ("nbd+unix://host/x?socket=/a", "no host"),
            ("nbd+unix:///x?socket=", "empty"),
            ("nbd:host", "port"),
        ] {
            let error = NbdAddress::parse(name.as_bytes()).expect_err(name);
            assert!(error.0.contains(why), "{name}: {error}");
        }
        let long = format!("nbd+unix:///?socket=/{}", "a".repeat(107));
        assert!(NbdAddress::parse(long.as_bytes()).is_err());
        let long = format!("nbd://host/{}", "a".repeat(4097));
        assert!(NbdAddress::parse(long.as_bytes()).is_err());
    }

    #[test]
    fn other_names_are_no_addresses() {
        for name in ["disk.img", "nbd", "nbd/x", "./nbd://x", "nbdx://y", "file:nbd", "/nbd:x"] {
            assert!(!NbdAddress::is_meant(name.as_bytes()), "{name}");
        }
    }
}
