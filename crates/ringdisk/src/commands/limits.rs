//! The limits that a command line gives to disks.
//!
//! Promises: disks of this process that name one group share its limits, whichever of them is
//! opened first.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_disk::Disk;
use ringdisk_throttle::Group;

use crate::cli::LimitWords;

/// The groups of this process by their names, and whether a disk has said what the limits are.
static GROUPS: Mutex<BTreeMap<String, (Arc<Group>, bool)>> = Mutex::new(BTreeMap::new());

fn usage(why: String) -> Failure {
    Failure::new(Exit::Usage, format!("--limit: {why}"))
}

/// Reads the words only.
///
/// Errors: words that mean nothing.
pub(crate) fn check(words: &[LimitWords]) -> Result<(), Failure> {
    LimitWords::together(words).map(drop).map_err(usage)
}

/// Limits the clients of a disk as was asked for. Before it is served.
///
/// Errors: words that mean nothing; two disks that say different things of one group; a disk that
/// cannot be limited.
pub(crate) fn apply(words: &[LimitWords], disk: &Disk) -> Result<(), Failure> {
    let (limits, name) = LimitWords::together(words).map_err(usage)?;
    let group = match name {
        None => match limits {
            None => return Ok(()),
            Some(limits) => Group::new(&limits),
        },
        Some(name) => {
            let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
            let new = || (Group::new(&limits.unwrap_or_default()), limits.is_some());
            let (group, is_said) = groups.entry(name.to_owned()).or_insert_with(new);
            match limits {
                Some(wanted) if *is_said && group.begun() != wanted => {
                    let current = group.begun();
                    return Err(usage(format!(
                        "the group '{name}' has the limits {current} and {wanted}: give them once"
                    )));
                }
                Some(wanted) if !*is_said => {
                    group.begin(&wanted);
                    *is_said = true;
                }
                Some(_) | None => {}
            }
            Arc::clone(group)
        }
    };
    Ok(disk.join_limits(&group)?)
}

/// The same of a disk that another process served until now: what a command has changed there since
/// its start holds here, too, unless the words are other ones than those of that start.
///
/// Errors: as [`apply`].
pub(crate) fn apply_to_handed(words: &[LimitWords], disk: &Disk) -> Result<(), Failure> {
    apply(words, disk)?;
    disk.handed_limits().map_or(Ok(()), |changed| Ok(disk.follow_limits(changed)?))
}
