//! Where front ends come from: a socket of ours, one that was inherited, or one of theirs.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use super::options::Listen;
use crate::{Error, ErrorKind};

/// Longest name of a socket, bytes (`sun_path` of unix(7), with the zero at its end).
const PATH_BYTES_MAX: usize = 107;

/// A source of front ends.
#[derive(Debug)]
pub(super) enum Door {
    /// We listen.
    Listens { listener: OwnedFd, _made: Option<Made> },
    /// The one that there will ever be.
    One(Option<OwnedFd>),
    /// We go to them.
    Connects(PathBuf),
}

/// A socket's name that we made and take away again.
#[derive(Debug)]
pub(super) struct Made {
    path: PathBuf,
    identity: (u64, u64),
}

impl Drop for Made {
    fn drop(&mut self) {
        // Only ours: somebody may have put another one in its place.
        let is_ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|found| (found.dev(), found.ino()) == self.identity);
        if is_ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!("{}: not removed: {error}", self.path.display());
        }
    }
}

impl Door {
    /// Opens it; with [`Listen::Path`] front ends can connect from now on.
    ///
    /// Errors: the name cannot be had, or somebody listens there.
    pub(super) fn open(listen: Listen) -> Result<Door, Error> {
        match listen {
            Listen::Path(path) => {
                let (listener, made) = bind(&path)?;
                Ok(Door::Listens { listener, _made: Some(made) })
            }
            Listen::Listener(listener) => {
                let cannot = |errno| {
                    Error::new(ErrorKind::Socket, "the listening socket cannot be used")
                        .errno(errno)
                };
                rustix::io::ioctl_fionbio(&listener, true).map_err(cannot)?;
                Ok(Door::Listens { listener, _made: None })
            }
            Listen::Stream(stream) => Ok(Door::One(Some(stream))),
            Listen::Connect(path) => Ok(Door::Connects(path)),
        }
    }

    /// The next front end, if one is there; never blocks for long.
    ///
    /// Errors: there will be none any more.
    pub(super) fn next(&mut self) -> Result<Option<OwnedFd>, Error> {
        match self {
            Door::Listens { listener, .. } => Ok(accept(listener)),
            Door::One(stream) => match stream.take() {
                Some(stream) => Ok(Some(stream)),
                None => Err(Error::new(ErrorKind::Socket, "the front end has gone")),
            },
            Door::Connects(path) => match UnixStream::connect(&*path) {
                Ok(stream) => Ok(Some(stream.into())),
                Err(error) => {
                    tracing::debug!("{}: {error}", path.display());
                    Ok(None)
                }
            },
        }
    }
}

/// A front end that has connected.
fn accept(listener: &OwnedFd) -> Option<OwnedFd> {
    match accept_with(listener, SocketFlags::CLOEXEC) {
        Ok(stream) => Some(stream),
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => None,
        Err(errno) => {
            tracing::warn!("a front end could not be accepted: {errno}");
            None
        }
    }
}

fn bind(path: &Path) -> Result<(OwnedFd, Made), Error> {
    let shown = path.display();
    let bytes = path.as_os_str().len();
    if bytes > PATH_BYTES_MAX {
        let text = format!(
            "'{shown}': the name of a socket has at most {PATH_BYTES_MAX} bytes, this one {bytes}"
        );
        return Err(
            Error::new(ErrorKind::Socket, text).hint("use a shorter directory, such as /run")
        );
    }
    let cannot = |error: io::Error| {
        let kind = match error.kind() {
            io::ErrorKind::PermissionDenied => ErrorKind::PermissionDenied,
            _ => ErrorKind::Socket,
        };
        Error::new(kind, format!("cannot listen on '{shown}'")).source(error)
    };
    remove_stale(path)?;
    let listener = UnixListener::bind(path).map_err(cannot)?;
    let found = fs::symlink_metadata(path).map_err(cannot)?;
    let made = Made { path: path.to_owned(), identity: (found.dev(), found.ino()) };
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(cannot)?;
    listener.set_nonblocking(true).map_err(cannot)?;
    Ok((listener.into(), made))
}

/// Takes away the socket of a process that was killed; nothing else that has this name.
fn remove_stale(path: &Path) -> Result<(), Error> {
    let shown = path.display();
    let Ok(found) = fs::symlink_metadata(path) else { return Ok(()) };
    if !found.file_type().is_socket() {
        let text = format!("'{shown}' is there already and is no socket");
        return Err(Error::new(ErrorKind::Socket, text).hint("choose another name"));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path)
            .map_err(|error| {
                Error::new(
                    ErrorKind::Socket,
                    format!("cannot replace '{shown}', which nobody listens on"),
                )
                .source(error)
            }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        _ => Err(Error::new(ErrorKind::Busy, format!("somebody listens on '{shown}' already"))
            .hint("stop that program, or choose another name")),
    }
}
