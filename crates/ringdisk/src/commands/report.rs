//! `ringdisk report`: what a bug report needs, in one file.
//!
//! Promises: the file is made new, with mode 0600.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::terminal::{self, Results, ended};
use ringdisk_observe::report::report;

use crate::cli::ReportArgs;

/// Writes it.
///
/// Errors: the file is there already, or cannot be written; there is no mount table.
pub(crate) fn run(args: &ReportArgs) -> Result<(), Failure> {
    let text = report()?;
    if args.output == Path::new("-") {
        let mut out = Results::lock();
        ended(out.write_all(text.as_bytes()))?;
        return out.finish();
    }
    let shown = args.output.display();
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&args.output);
    made.and_then(|mut file| file.write_all(text.as_bytes())).map_err(|error| {
        Failure::system(format!("cannot write the report '{shown}'"), &error, Exit::General)
    })?;
    terminal::say(format_args!(
        "'{shown}' is written: read it before you send it; it has names of images and mountpoints."
    ));
    Ok(())
}
