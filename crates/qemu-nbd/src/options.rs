//! All words of one `qemu-nbd`, and what they mean together.
//!
//! Promises: values are judged in the order of the words, then the words together, as `qemu-nbd`
//! does it; so of several mistakes the same one is told.

use std::error::Error;
use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ringdisk_disk::{Cache, DetectZeroes, Discard};

use crate::getopt::{Known, Word, Words};
use crate::values::{self, Aio, SnapshotName};

/// What is wrong with the words. Exit code 1.
///
/// Its text is that of `qemu-nbd`, with the name of the program; several lines for some.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageError(String);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for UsageError {}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Invocation {
    /// Print the help, and end with 0.
    Help,
    /// Print the version, and end with 0.
    Version,
    /// Serve an image.
    Serve(Box<Serve>),
    /// Say what a server exports (`-L`).
    List(List),
    /// Disconnect this device (`-d`).
    Disconnect(PathBuf),
}

/// Serve an image (`qemu-nbd FILE`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Serve {
    /// `FILE`, and how it is to be read.
    pub images: Images,
    /// Where clients find it.
    pub listen: Listen,
    /// What of the above was said, in words that deny it: it does not go with a socket that the
    /// process is started with.
    pub said_place: Option<&'static str>,
    /// Connect it to this device (`-c`).
    pub device: Option<PathBuf>,
    /// Clients at once (`-e`); 0: any number. Others wait.
    pub shared: u32,
    /// Stay when the last client has gone (`-t`).
    pub persistent: bool,
    /// Keep the standard error output in the background (`-v`).
    pub verbose: bool,
    /// Name of the export (`-x`).
    pub name: String,
    /// Text for people (`-D`).
    pub description: Option<String>,
    /// Seconds that a client has for its handshake; 0: no limit.
    pub handshake_limit_s: u32,
    /// Offer `qemu:allocation-depth` (`-A`).
    pub allocation_depth: bool,
    /// Bitmaps to offer (`-B`).
    pub bitmaps: Vec<String>,
    /// Clients cannot write (`-r`, `-l`).
    pub read_only: bool,
    /// Go into the background (`--fork`).
    pub fork: bool,
    /// Write the process id here (`--pid-file`).
    pub pid_file: Option<PathBuf>,
    /// Label of the listening socket (`--selinux-label`).
    pub selinux_label: Option<String>,
    /// TLS, and who may come.
    pub tls: TlsWords,
}

/// The image, and how it is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Images {
    /// A name, a URI, `json:…`, or options (`--image-opts`).
    pub file: OsString,
    /// `file` is `driver=…,file.filename=…`.
    pub are_options: bool,
    /// Its format (`-f`); none: it is probed, with a warning.
    pub format: Option<String>,
    /// Bytes of the image that are left out at its beginning (`-o`).
    pub offset: u64,
    /// Write into a temporary overlay (`-s`).
    pub temporary: bool,
    /// Export this internal snapshot (`-l`).
    pub snapshot: Option<SnapshotName>,
    /// `--cache`, `-n`.
    pub cache: Cache,
    /// `--aio`.
    pub aio: Aio,
    /// `--discard`.
    pub discard: Discard,
    /// `--detect-zeroes`.
    pub detect_zeroes: DetectZeroes,
}

/// Where clients find the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// A Unix socket (`-k`).
    Unix(PathBuf),
    /// TCP (`-b`, `-p`).
    Tcp(Address),
}

/// An address of TCP, not looked up yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Name or number of the host.
    pub host: String,
    /// Number or name of the port.
    pub port: String,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// Say what a server exports (`qemu-nbd -L`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List {
    /// Where the server is.
    pub server: Listen,
    /// TLS.
    pub tls: TlsWords,
}

/// Words about TLS.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsWords {
    /// `--object`, in their order.
    pub objects: Vec<String>,
    /// `--tls-creds`: the id of an object.
    pub credentials: Option<String>,
    /// `--tls-authz`: the id of an object.
    pub authorization: Option<String>,
    /// `--tls-hostname`: the name that the certificate of a server has.
    pub hostname: Option<String>,
}

/// Port where there is no `-p` (IANA).
const PORT: &str = "10809";
/// Address where there is no `-b`: every one of the host, as `qemu-nbd`.
const HOST: &str = "0.0.0.0";
/// Clients have so long for their handshake, seconds.
const HANDSHAKE_LIMIT_S: u32 = 10;
/// Longest path of a Unix socket (`sun_path` of unix(7), with its NUL).
const SOCKET_PATH_BYTES_MAX: usize = 107;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Id {
    Help,
    Version,
    Port,
    Bind,
    Socket,
    Shared,
    Persistent,
    Verbose,
    ExportName,
    Description,
    HandshakeLimit,
    Offset,
    AllocationDepth,
    Bitmap,
    List,
    Object,
    TlsCreds,
    TlsAuthz,
    TlsHostname,
    Trace,
    Fork,
    PidFile,
    SelinuxLabel,
    Connect,
    Disconnect,
    Format,
    ReadOnly,
    Snapshot,
    LoadSnapshot,
    NoCache,
    Cache,
    Aio,
    Discard,
    DetectZeroes,
    ImageOpts,
}

const fn flag(short: Option<u8>, long: &'static str, id: Id) -> Known<Id> {
    Known { short, long, takes_value: false, id }
}

const fn value(short: Option<u8>, long: &'static str, id: Id) -> Known<Id> {
    Known { short, long, takes_value: true, id }
}

/// In the order in which `qemu-nbd` names them where a shortened name is ambiguous.
const KNOWN: &[Known<Id>] = &[
    flag(Some(b'h'), "help", Id::Help),
    flag(Some(b'V'), "version", Id::Version),
    value(Some(b'b'), "bind", Id::Bind),
    value(Some(b'p'), "port", Id::Port),
    value(Some(b'k'), "socket", Id::Socket),
    value(Some(b'o'), "offset", Id::Offset),
    flag(Some(b'r'), "read-only", Id::ReadOnly),
    flag(Some(b'A'), "allocation-depth", Id::AllocationDepth),
    value(Some(b'B'), "bitmap", Id::Bitmap),
    value(Some(b'c'), "connect", Id::Connect),
    flag(Some(b'd'), "disconnect", Id::Disconnect),
    flag(Some(b'L'), "list", Id::List),
    flag(Some(b's'), "snapshot", Id::Snapshot),
    value(Some(b'l'), "load-snapshot", Id::LoadSnapshot),
    flag(Some(b'n'), "nocache", Id::NoCache),
    value(None, "cache", Id::Cache),
    value(None, "aio", Id::Aio),
    value(None, "discard", Id::Discard),
    value(None, "detect-zeroes", Id::DetectZeroes),
    value(Some(b'e'), "shared", Id::Shared),
    value(Some(b'f'), "format", Id::Format),
    flag(Some(b't'), "persistent", Id::Persistent),
    flag(Some(b'v'), "verbose", Id::Verbose),
    value(None, "object", Id::Object),
    value(Some(b'x'), "export-name", Id::ExportName),
    value(Some(b'D'), "description", Id::Description),
    value(None, "tls-creds", Id::TlsCreds),
    value(None, "tls-hostname", Id::TlsHostname),
    value(None, "tls-authz", Id::TlsAuthz),
    flag(None, "image-opts", Id::ImageOpts),
    value(Some(b'T'), "trace", Id::Trace),
    flag(None, "fork", Id::Fork),
    value(None, "pid-file", Id::PidFile),
    value(None, "selinux-label", Id::SelinuxLabel),
    value(None, "handshake-limit", Id::HandshakeLimit),
];

/// What was read so far.
#[derive(Default)]
struct Reading {
    host: Option<String>,
    port: Option<String>,
    socket: Option<PathBuf>,
    device: Option<PathBuf>,
    disconnects: bool,
    lists: bool,
    shared: Option<u32>,
    persistent: bool,
    verbose: bool,
    name: Option<String>,
    description: Option<String>,
    handshake_limit_s: Option<u32>,
    offset: Option<u64>,
    allocation_depth: bool,
    bitmaps: Vec<String>,
    read_only: bool,
    temporary: bool,
    snapshot: Option<SnapshotName>,
    cache: Option<Cache>,
    aio: Option<Aio>,
    discard: Option<Discard>,
    detect_zeroes: DetectZeroes,
    format: Option<String>,
    image_opts: bool,
    fork: bool,
    pid_file: Option<PathBuf>,
    selinux_label: Option<String>,
    tls: TlsWords,
    operands: Vec<OsString>,
}

/// Reads the words of a command line.
///
/// * `program`: the name under which the program was started; errors begin with its last part.
/// * `words`: all but the first.
///
/// Errors: the words are wrong by themselves or together.
pub fn parse(
    program: &str,
    words: impl IntoIterator<Item = OsString>,
) -> Result<Invocation, UsageError> {
    let short = Path::new(program).file_name().map_or_else(|| program.into(), values::text);
    let fail = |text: String| UsageError(format!("{short}: {text}"));
    let unknown = |text: String| {
        let first = format!("{program}: {text}");
        UsageError(format!("{first}\n{short}: Try `{program} --help' for more information."))
    };
    let mut read = Reading::default();
    for word in Words::new(KNOWN, words.into_iter()) {
        match word.map_err(unknown)? {
            Word::Operand(operand) => read.operands.push(operand),
            Word::Option(Id::Help, _) => return Ok(Invocation::Help),
            Word::Option(Id::Version, _) => return Ok(Invocation::Version),
            Word::Option(id, value) => {
                read.take(id, value.unwrap_or_default(), &short).map_err(fail)?;
            }
        }
    }
    read.conclude(program).map_err(fail)
}

impl Reading {
    /// One option. `value` is empty for those without.
    fn take(&mut self, id: Id, value: OsString, program: &str) -> Result<(), String> {
        match id {
            Id::Bind => self.host = Some(values::text(&value)),
            Id::Port => self.port = Some(values::text(&value)),
            Id::Socket => self.socket = Some(socket(value)?),
            Id::Shared => self.shared = Some(values::shared(&value)?),
            Id::Persistent => self.persistent = true,
            Id::Verbose => self.verbose = true,
            Id::ExportName => self.name = Some(values::name(value, "export name")?),
            Id::Description => self.description = Some(values::name(value, "export description")?),
            Id::HandshakeLimit => self.handshake_limit_s = Some(values::handshake_limit(&value)?),
            Id::AllocationDepth => self.allocation_depth = true,
            Id::Bitmap => self.bitmaps.push(values::text(&value)),
            Id::List => self.lists = true,
            Id::Object => self.tls.objects.push(values::text(&value)),
            Id::TlsCreds => self.tls.credentials = Some(values::text(&value)),
            Id::TlsAuthz => self.tls.authorization = Some(values::text(&value)),
            Id::TlsHostname => self.tls.hostname = Some(values::text(&value)),
            Id::Trace => return Err(String::from("--trace is not supported")),
            Id::Fork => self.fork = true,
            Id::PidFile => self.pid_file = Some(value.into()),
            Id::SelinuxLabel => self.selinux_label = Some(values::text(&value)),
            Id::Connect => self.device = Some(value.into()),
            Id::Disconnect => self.disconnects = true,
            Id::Help | Id::Version => {}
            _ => return self.take_of_image(id, value, program),
        }
        Ok(())
    }

    /// One option about the image.
    fn take_of_image(&mut self, id: Id, value: OsString, program: &str) -> Result<(), String> {
        match id {
            Id::Offset => self.offset = Some(values::offset(&value)?),
            Id::Format => self.format = Some(values::text(&value)),
            Id::ReadOnly => self.read_only = true,
            Id::Snapshot => self.temporary = true,
            Id::LoadSnapshot => {
                self.snapshot = Some(values::snapshot(&value, program)?);
                self.read_only = true;
            }
            Id::NoCache | Id::Cache if self.cache.is_some() => {
                return Err(String::from("-n and --cache can only be specified once"));
            }
            Id::NoCache => self.cache = Some(Cache::None),
            Id::Cache => self.cache = Some(values::cache(&value)?),
            Id::Aio if self.aio.is_some() => {
                return Err(String::from("--aio can only be specified once"));
            }
            Id::Aio => self.aio = Some(values::aio(&value)?),
            Id::Discard if self.discard.is_some() => {
                return Err(String::from("--discard can only be specified once"));
            }
            Id::Discard => self.discard = Some(values::discard(&value)?),
            Id::DetectZeroes => {
                self.detect_zeroes = values::zeroes(&value)?;
                // Judged with what came before it, as `qemu-nbd` does.
                if self.detect_zeroes == DetectZeroes::Unmap && self.discard != Some(Discard::Unmap)
                {
                    return Err(String::from(
                        "setting detect-zeroes to unmap is not allowed without setting discard \
                         operation to unmap",
                    ));
                }
            }
            Id::ImageOpts => self.image_opts = true,
            _ => {}
        }
        Ok(())
    }

    /// All words together.
    fn conclude(self, program: &str) -> Result<Invocation, String> {
        let number_is_wrong =
            || format!("Invalid number of arguments\nTry `{program} --help' for more information.");
        if self.lists {
            return self.list();
        }
        let [file] = self.operands.as_slice() else { return Err(number_is_wrong()) };
        if self.tls.credentials.is_none() {
            if self.tls.authorization.is_some() {
                return Err(String::from("--tls-authz is not permitted without --tls-creds"));
            }
            if self.tls.hostname.is_some() {
                return Err(String::from("--tls-hostname is not permitted without --tls-creds"));
            }
        }
        if self.disconnects {
            return Ok(Invocation::Disconnect(file.into()));
        }
        if self.image_opts && self.format.is_some() {
            return Err(String::from("--image-opts and -f are mutually exclusive"));
        }
        let file = file.clone();
        Ok(Invocation::Serve(Box::new(self.serve(file))))
    }

    fn list(self) -> Result<Invocation, String> {
        if !self.operands.is_empty() {
            return Err(String::from("List mode is incompatible with a file name"));
        }
        let says_more = self.name.is_some()
            || self.description.is_some()
            || self.offset.is_some_and(|bytes| bytes > 0)
            || self.allocation_depth
            || !self.bitmaps.is_empty()
            || self.device.is_some()
            || self.disconnects
            || self.format.is_some()
            || self.snapshot.is_some()
            || self.cache.is_some()
            || self.aio.is_some()
            || self.discard.is_some();
        if self.fork {
            return Err(String::from("List mode is incompatible with forking"));
        }
        if says_more {
            return Err(String::from("List mode is incompatible with per-device settings"));
        }
        Ok(Invocation::List(List {
            server: listen(self.socket, self.host, self.port),
            tls: self.tls,
        }))
    }

    fn serve(self, file: OsString) -> Serve {
        let said_place = [
            (self.device.is_some(), "NBD device can't be set when using socket activation"),
            (self.socket.is_some(), "Unix socket can't be set when using socket activation"),
            (self.host.is_some(), "The interface can't be set when using socket activation"),
            (self.port.is_some(), "TCP port number can't be set when using socket activation"),
            (
                self.selinux_label.is_some(),
                "SELinux label can't be set when using socket activation",
            ),
        ];
        let said_place = said_place.into_iter().find(|(is_said, _)| *is_said);
        Serve {
            said_place: said_place.map(|(_, text)| text),
            images: Images {
                file,
                are_options: self.image_opts,
                format: self.format,
                offset: self.offset.unwrap_or_default(),
                temporary: self.temporary,
                snapshot: self.snapshot,
                cache: self.cache.unwrap_or_default(),
                aio: self.aio.unwrap_or_default(),
                discard: self.discard.unwrap_or(Discard::Ignore),
                detect_zeroes: self.detect_zeroes,
            },
            listen: listen(self.socket, self.host, self.port),
            device: self.device,
            shared: self.shared.unwrap_or(1),
            persistent: self.persistent,
            verbose: self.verbose,
            name: self.name.unwrap_or_default(),
            description: self.description,
            handshake_limit_s: self.handshake_limit_s.unwrap_or(HANDSHAKE_LIMIT_S),
            allocation_depth: self.allocation_depth,
            bitmaps: self.bitmaps,
            read_only: self.read_only,
            fork: self.fork,
            pid_file: self.pid_file,
            selinux_label: self.selinux_label,
            tls: self.tls,
        }
    }
}

/// `-k`.
fn socket(value: OsString) -> Result<PathBuf, String> {
    if !Path::new(&value).is_absolute() {
        return Err(String::from("socket path must be absolute"));
    }
    if value.as_bytes().len() > SOCKET_PATH_BYTES_MAX {
        let path = values::text(&value);
        return Err(format!(
            "UNIX socket path '{path}' is too long\nPath must be less than 108 bytes"
        ));
    }
    Ok(value.into())
}

/// A socket's path is taken before a host and a port.
fn listen(socket: Option<PathBuf>, host: Option<String>, port: Option<String>) -> Listen {
    let word = |given: Option<String>, default: &str| given.unwrap_or_else(|| default.to_owned());
    match socket {
        Some(path) => Listen::Unix(path),
        None => Listen::Tcp(Address { host: word(host, HOST), port: word(port, PORT) }),
    }
}

#[cfg(test)]
mod tests;
