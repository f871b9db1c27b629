//! QEMU's programs in words: the command line of `qemu-nbd` with its options, defaults and texts,
//! and failures as `qemu-nbd` and `qemu-img` report them.
//!
//! Promises: what `qemu-nbd` 11.1 takes is taken, with the same meaning, or refused with the name
//! of the option; an error has the text and the exit code of QEMU's program, since scripts look for
//! them. Only words and the causes of failures are judged here: no file is looked at, nothing is
//! opened.
//!
//! - [`parse`], [`help`], [`version`], [`tls`]: the words of `qemu-nbd`;
//! - [`nbd_texts`], [`img_texts`]: failures in the words of `qemu-nbd` and of `qemu-img`.
//!
//! ```
//! use ringdisk_qemu_nbd::{Invocation, Listen, parse};
//!
//! let words = ["-t", "-e", "4", "-k", "/run/disk.sock", "-f", "qcow2", "disk.qcow2"];
//! let Ok(Invocation::Serve(serve)) = parse("qemu-nbd", words.map(Into::into)) else { panic!() };
//! assert_eq!(serve.listen, Listen::Unix("/run/disk.sock".into()));
//! assert_eq!(serve.shared, 4);
//!
//! let error = parse("qemu-nbd", ["--shared=many".into(), "disk".into()]).unwrap_err();
//! assert_eq!(error.to_string(), "qemu-nbd: Invalid shared device number 'many'");
//! ```

#![forbid(unsafe_code)]

mod getopt;
mod help;
pub mod img_texts;
pub mod nbd_texts;
mod objects;
mod options;
mod values;

pub use help::{help, version};
pub use objects::{Endpoint, Tls, tls};
pub use options::{Address, Images, Invocation, List, Listen, Serve, TlsWords, UsageError, parse};
pub use values::{Aio, SnapshotName};

/// The release of QEMU whose programs these are.
pub const VERSION: &str = "11.1.3";
