//! Where to connect to the server of an NBD export.
//!
//! Promises: plain values; only [`NbdEndpoint::begin`] makes a system call, and does not wait.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt,
};

/// A host that answers nothing for so long is gone (`TCP_USER_TIMEOUT`, keepalive).
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Where to connect, with the name of a host looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdEndpoint {
    /// Path of a Unix socket.
    Unix(PathBuf),
    /// Address and port.
    Tcp(SocketAddr),
}

impl fmt::Display for NbdEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NbdEndpoint::Unix(path) => write!(f, "unix:{}", path.display()),
            NbdEndpoint::Tcp(address) => address.fmt(f),
        }
    }
}

impl FromStr for NbdEndpoint {
    type Err = std::net::AddrParseError;

    /// Reads what `Display` writes.
    fn from_str(text: &str) -> Result<NbdEndpoint, Self::Err> {
        match text.strip_prefix("unix:") {
            Some(path) => Ok(NbdEndpoint::Unix(path.into())),
            None => text.parse().map(NbdEndpoint::Tcp),
        }
    }
}

/// Requests that a Unix socket holds for its server, bytes: with the kernel's default a write of
/// 256 KiB does not fit. As of `ringdisk-nbd`.
const SEND_BYTES: usize = 512 << 10;

impl NbdEndpoint {
    /// Begins to connect: the socket is not blocking, and writable when it is connected. For a
    /// helper process that must not wait.
    ///
    /// Errors: those of socket(2) and connect(2); EAGAIN where the queue of a Unix socket is full.
    pub fn begin(&self) -> Result<OwnedFd, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let family = match self {
            NbdEndpoint::Unix(_) => AddressFamily::UNIX,
            NbdEndpoint::Tcp(SocketAddr::V4(_)) => AddressFamily::INET,
            NbdEndpoint::Tcp(SocketAddr::V6(_)) => AddressFamily::INET6,
        };
        let socket = socket_with(family, SocketType::STREAM, flags, None)?;
        let begun = match self {
            NbdEndpoint::Unix(path) => {
                // Not needed either.
                let _ = sockopt::set_socket_send_buffer_size(&socket, SEND_BYTES);
                connect(&socket, &SocketAddrUnix::new(path.as_path())?)
            }
            NbdEndpoint::Tcp(address) => {
                // Set before, so that they hold while it connects, too. None is needed.
                let _ = sockopt::set_tcp_nodelay(&socket, true);
                let _ = sockopt::set_socket_keepalive(&socket, true);
                let _ = sockopt::set_tcp_keepidle(&socket, SILENCE_MAX / 3);
                let _ = sockopt::set_tcp_keepintvl(&socket, SILENCE_MAX / 6);
                let _ = sockopt::set_tcp_keepcnt(&socket, 4);
                let silence = u32::try_from(SILENCE_MAX.as_millis()).unwrap_or(u32::MAX);
                let _ = sockopt::set_tcp_user_timeout(&socket, silence);
                connect(&socket, address)
            }
        };
        match begun {
            Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
            Err(errno) => Err(errno),
        }
    }
}
