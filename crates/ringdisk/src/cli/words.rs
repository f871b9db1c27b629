//! Words of options that several commands share, as clap knows them.
//!
//! Promises: parses only; a word that is none of an option's is refused with the list of those that
//! are.

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use ringdisk_daemon::confine::Confinement;
use ringdisk_daemon::size::parse_size;
use ringdisk_disk::{AllowedHost, DetectZeroes, Discard};
use ringdisk_export::Numa;
use ringdisk_fuse::{Stay, Transport, ZeroCopy};
use ringdisk_qcow2::Preallocation;
use ringdisk_vhost::export::{Engine, OnError, Packed, Second};

/// Reads a server of `--allow-host`.
pub(crate) fn parse_host(text: &str) -> Result<AllowedHost, String> {
    text.parse().map_err(|error: ringdisk_disk::Error| error.to_string())
}

/// Reads options of a new image; says of those that belong to a mount how they are written here.
pub(crate) fn parse_new_image_options(text: &str) -> Result<String, String> {
    let of_mounts = |word: &str| match word {
        "ro" => Some("`-o ro` is written --read-only here"),
        "rw" => Some("a mount can be written unless --read-only is given: leave `-o rw` out"),
        "allow_other" => Some("`-o allow_other` is written --allow-other here"),
        _ => None,
    };
    match text.split(',').find_map(of_mounts) {
        Some(instead) => Err(format!("{instead}; -o takes the options of a new image (--create)")),
        None => Ok(text.to_owned()),
    }
}

/// The words of an option: each with what it means, for the help, and its value.
pub(crate) type Words<T> = [(&'static str, &'static str, T)];

/// Reads one of some words.
pub(crate) fn one_of<T: Copy + Send + Sync + 'static>(
    words: &'static Words<T>,
) -> impl TypedValueParser<Value = T> {
    let values = words.iter().map(|(word, help, _)| PossibleValue::new(*word).help(*help));
    PossibleValuesParser::new(values).try_map(|given| {
        let word = words.iter().find(|(word, ..)| *word == given);
        word.map(|(.., value)| *value).ok_or("it is none of the words")
    })
}

/// The words of `--discard`.
pub(crate) const DISCARD: &Words<Discard> = &[
    ("ignore", "Nothing", Discard::Ignore),
    ("unmap", "The bytes read as zeroes and their place is given back", Discard::Unmap),
];

/// The words of `--detect-zeroes`.
pub(crate) const DETECT_ZEROES: &Words<DetectZeroes> = &[
    ("off", "They are written like everything else", DetectZeroes::Off),
    ("on", "They are stored as zeroes without bytes", DetectZeroes::On),
    ("unmap", "The same, and their place is given back", DetectZeroes::Unmap),
];

/// The words of `--preallocation`.
pub(crate) const PREALLOCATION: &Words<Preallocation> = &[
    ("off", "Nothing", Preallocation::Off),
    ("metadata", "The tables, over a sparse file", Preallocation::Metadata),
    ("falloc", "The tables, and space that the file system reserves", Preallocation::Falloc),
    ("full", "The tables, and zeroes that are written", Preallocation::Full),
];

/// The words of `--transport`.
pub(crate) const TRANSPORT: &Words<Transport> = &[
    ("auto", "The best that works here", Transport::Auto),
    ("dev", "/dev/fuse", Transport::Dev),
    ("uring", "FUSE over io_uring", Transport::Uring),
];

/// The words of `--zero-copy`.
pub(crate) const ZERO_COPY: &Words<ZeroCopy> = &[
    ("auto", "When it promises something", ZeroCopy::Auto),
    ("on", "For every open", ZeroCopy::On),
    ("off", "Never", ZeroCopy::Off),
];

/// The words of `--stay`.
pub(crate) const STAY: &Words<Stay> = &[
    ("home", "With the thread on the CPU of their callers", Stay::Home),
    ("away", "With the thread beside it", Stay::Away),
    ("split", "Half and half", Stay::Split),
    ("free", "At home, threads unbound", Stay::Free),
];

/// The words of `--numa`.
pub(crate) const NUMA: &Words<Numa> =
    &[("auto", "They do, where there are several", Numa::Auto), ("off", "They do not", Numa::Off)];

/// The short help of `--cpus`.
pub(crate) const CPUS: &str =
    "CPUs for the queue threads, such as 0-3,8 [default: all that the process may use]";

/// The long help of `--cpus`.
///
/// * `$more`: what else there is to say of this command's; begins with a blank.
macro_rules! cpus_long_help {
    ($more:literal) => {
        concat!(
            "CPUs for the queue threads, such as 0-3,8 [default: all that the process may use]\n\n",
            "As the kernel and taskset write it: numbers and ranges; 10-14:2 is every second CPU ",
            "of a range. CPUs that are offline, not allowed here or not in this machine are left ",
            "out with a warning.",
            $more
        )
    };
}
pub(crate) use cpus_long_help;

/// The words of `--second-front-end`.
pub(crate) const SECOND: &Words<Second> = &[
    ("wait", "It waits until the first has gone", Second::Wait),
    ("refuse", "It is sent away", Second::Refuse),
];

/// The words of `--packed`.
pub(crate) const PACKED: &Words<Packed> = &[
    ("auto", "Unless the kernel could serve split ones", Packed::Auto),
    ("on", "They are", Packed::On),
    ("off", "They are not", Packed::Off),
];

/// The words of `--accel-engine`.
pub(crate) const ENGINE: &Words<Engine> = &[
    ("auto", "As the module thinks best", Engine::Default),
    ("kiocb", "As files do", Engine::Kiocb),
    ("bio", "As block devices do", Engine::Bio),
];

/// The words of `--on-error`.
pub(crate) const ON_ERROR: &Words<OnError> = &[
    ("report", "It is counted and told", OnError::Report),
    ("stop", "It ends the disk", OnError::Stop),
];

/// How an option spells a value.
pub(crate) fn word_of<T: Copy + PartialEq>(words: &Words<T>, value: T) -> &'static str {
    let found = words.iter().find(|(_, _, this)| *this == value);
    found.map_or("", |(word, ..)| word)
}

/// The words of `--sandbox`.
const SANDBOX: &Words<Confinement> = &[
    ("auto", "For root, as far as the kernel can", Confinement::Auto),
    ("on", "Wholly, or not at all", Confinement::On),
    ("strict", "As on, and no new files", Confinement::Strict),
    ("off", "Not", Confinement::Off),
];

/// How far a serving process is confined.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct SandboxArgs {
    /// Take everything away from the serving process that serving does not need: auto (on for
    /// root), on, strict, off
    ///
    /// Files but those of the images, system calls, capabilities, operations of rings
    /// (docs/sandbox.md). auto goes on where the kernel lacks one of these, and says so; on does
    /// not. strict is on without new files: `ringdisk ctl snapshot` is refused. Otherwise it may
    /// put an overlay into the directory of the image, or below one that --allow-path names; other
    /// files there are out of reach, so `ringdisk ctl backing` to a file that is not in the chain
    /// needs --allow-path. Of several disks in one process each can be reached from all.
    #[arg(
        id = "sandbox",
        long = "sandbox",
        value_name = "WHEN",
        value_parser = one_of(SANDBOX),
        default_value = "auto",
        help_heading = "Serving options"
    )]
    pub(crate) word: Confinement,
}

/// Cap of a metadata cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum CacheSize {
    /// As the image needs it.
    #[default]
    Auto,
    /// Bytes for each layer.
    Bytes(u64),
}

impl CacheSize {
    /// Bytes; `None`: by the image.
    pub(crate) fn bytes(self) -> Option<u64> {
        match self {
            CacheSize::Auto => None,
            CacheSize::Bytes(bytes) => Some(bytes),
        }
    }
}

/// Reads `auto` or a size.
pub(crate) fn parse_cache_size(text: &str) -> Result<CacheSize, String> {
    if text == "auto" { Ok(CacheSize::Auto) } else { parse_size(text).map(CacheSize::Bytes) }
}

/// Reads `on` or `off`.
pub(crate) fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(String::from("write on or off")),
    }
}
