//! `ringdisk ps`: the disks that are served on this machine.
//!
//! Promises: asks servers, and changes nothing. One that does not answer is listed as such and
//! holds the list up for a limited time.

use std::io::Write as _;
use std::path::Path;
use std::time::SystemTime;

use ringdisk_daemon::control::address;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::processes::{self, Entry};
use ringdisk_daemon::terminal::{self, Results, ended};

use crate::cli::PsArgs;
use ringdisk_console::output::json;

/// Lists them.
///
/// Errors: there is no mount table.
pub(crate) fn run(args: &PsArgs) -> Result<(), Failure> {
    let entries = processes::list(!args.targets)?;
    let mut out = Results::lock();
    if args.targets {
        let is_target =
            |place: &str| place.starts_with('/') || address::name_of(Path::new(place)).is_some();
        let with_name = |entry: &&Entry| entry.is_alive() && is_target(&entry.place);
        for entry in entries.iter().filter(with_name) {
            ended(writeln!(out, "{}", entry.place))?;
        }
        return out.finish();
    }
    if args.json {
        ended(json(&mut out, &processes::to_json(&entries)))?;
        return out.finish();
    }
    if entries.is_empty() {
        ended(writeln!(out, "No disk is served."))?;
        return out.finish();
    }
    ended(write!(out, "{}", processes::text_table(&entries, SystemTime::now())))?;
    for job in processes::text_jobs(&entries) {
        ended(writeln!(out, "{job}"))?;
    }
    out.finish()?;
    processes::problems(&entries).iter().for_each(terminal::note);
    Ok(())
}
