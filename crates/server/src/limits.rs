//! The limits that a command line gives to disks.
//!
//! Promises: disks of this process that name one group share its limits, whichever of them is
//! opened first.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_disk::Disk;
use ringdisk_throttle::{Group, Limits};

/// One `--limit`: fields, and the name of a group.
#[derive(Clone, Debug)]
pub struct LimitWords {
    /// `NAME=VALUE,…`; may be empty.
    pub fields: String,
    /// The name of a group that shares limits.
    pub group: Option<String>,
}

/// Reads one `--limit`. Fields that need one another may stand in several.
///
/// Errors: a group without a name.
pub fn parse_limits(text: &str) -> Result<LimitWords, String> {
    let (mut fields, mut group) = (Vec::new(), None);
    for part in text.split(',') {
        match part.trim().strip_prefix("group=") {
            Some("") => return Err(String::from("a group has a name: group=NAME")),
            Some(name) => group = Some(name.to_owned()),
            None => fields.push(part),
        }
    }
    Ok(LimitWords { fields: fields.join(","), group })
}

impl LimitWords {
    /// What several of them say together: the limits, if there are any, and the group.
    ///
    /// Errors: as [`Limits::changed`]; two groups.
    pub fn together(all: &[LimitWords]) -> Result<(Option<Limits>, Option<&str>), String> {
        let mut groups = all.iter().filter_map(|words| words.group.as_deref());
        let group = groups.next();
        if let Some(other) = groups.find(|other| Some(*other) != group) {
            return Err(format!("a disk is in one group: not in '{other}', too"));
        }
        let fields: Vec<&str> = all.iter().map(|words| words.fields.as_str()).collect();
        let text = fields.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(",");
        if text.is_empty() {
            return Ok((None, group));
        }
        let limits = text.parse::<Limits>().map_err(|why| why.to_string())?;
        Ok((Some(limits), group))
    }
}

/// The groups of this process by their names, and whether a disk has said what the limits are.
static GROUPS: Mutex<BTreeMap<String, (Arc<Group>, bool)>> = Mutex::new(BTreeMap::new());

fn usage(why: String) -> Failure {
    Failure::new(Exit::Usage, format!("--limit: {why}"))
}

/// Reads the words only.
///
/// Errors: words that mean nothing.
pub fn check(words: &[LimitWords]) -> Result<(), Failure> {
    LimitWords::together(words).map(drop).map_err(usage)
}

/// Limits the clients of a disk as was asked for. Before it is served.
///
/// Errors: words that mean nothing; two disks that say different things of one group; a disk that
/// cannot be limited.
pub fn apply(words: &[LimitWords], disk: &Disk) -> Result<(), Failure> {
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
pub fn apply_to_handed(words: &[LimitWords], disk: &Disk) -> Result<(), Failure> {
    apply(words, disk)?;
    disk.handed_limits().map_or(Ok(()), |changed| Ok(disk.follow_limits(changed)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &[&str]) -> Result<(String, Option<String>), String> {
        let words = words.iter().map(|text| parse_limits(text));
        let words = words.collect::<Result<Vec<_>, _>>()?;
        let (limits, group) = LimitWords::together(&words)?;
        let limits = limits.map_or_else(String::new, |limits| limits.to_string());
        Ok((limits, group.map(str::to_owned)))
    }

    #[test]
    fn several_words_say_one_thing() {
        let ok =
            |limits: &str, group: Option<&str>| Ok((limits.to_owned(), group.map(str::to_owned)));
        assert_eq!(read(&["iops-max=9", "group=a,iops=5"]), ok("iops=5,iops-max=9", Some("a")));
        assert_eq!(read(&["group=a"]), ok("", Some("a")));
        assert_eq!(read(&["group=a", "iops=0"]), ok("none", Some("a")));
        assert!(read(&["group="]).is_err());
        assert!(read(&["group=a", "group=b"]).is_err());
        assert!(read(&["iops=x"]).is_err());
        assert!(read(&["iops-max=9"]).is_err());
    }
}
