//! Names of users.
//!
//! Promises: only `/etc/passwd` and `/etc/group` are read: a directory service is a program of
//! others in this process, and root's.

use std::fmt;
use std::fs;

use ringdisk_sandbox::User;

use crate::failure::{Exit, Failure};
use crate::sockets;
use crate::terminal::visible;

/// A user that a process can become.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub(crate) user: User,
    /// `None`: it has none.
    name: Option<String>,
}

impl Identity {
    /// Whether it is the user and the group with these numbers.
    pub(crate) fn is(&self, uid: u32, gid: u32) -> bool {
        (self.user.uid(), self.user.gid()) == (uid, gid)
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (uid, gid) = (self.user.uid(), self.user.gid());
        match &self.name {
            Some(name) => write!(f, "{} ({uid}:{gid})", visible(name)),
            None => write!(f, "{uid}:{gid}"),
        }
    }
}

/// What `/etc/passwd` says of a user: name, number and group.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    name: String,
    uid: u32,
    gid: u32,
}

/// Source: passwd(5): name, password, number, group and more between colons.
fn entries(all: &str) -> impl Iterator<Item = Entry> {
    all.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?.to_owned();
        let mut number = |skipped| fields.nth(skipped)?.parse().ok();
        Some(Entry { name, uid: number(1)?, gid: number(0)? })
    })
}

fn passwd() -> String {
    fs::read_to_string("/etc/passwd").unwrap_or_default()
}

/// The name of a user, for people. `None`: `/etc/passwd` has none.
pub fn user_name(uid: u32) -> Option<String> {
    entries(&passwd()).find(|entry| entry.uid == uid).map(|entry| visible(&entry.name))
}

/// The user of a command line; `None`: it is root by another name.
///
/// Errors: nobody is called so; a number without a group, which is known by name only.
pub(crate) fn find(user: &str, group: Option<&str>) -> Result<Option<Identity>, Failure> {
    find_in(&passwd(), user, group)
}

fn find_in(all: &str, user: &str, group: Option<&str>) -> Result<Option<Identity>, Failure> {
    let usage = |text: String| Failure::new(Exit::Usage, text);
    let shown = visible(user);
    let entry = match user.parse::<u32>() {
        // The first of several with this number, as getpwuid(3) has it.
        Ok(number) => entries(all).find(|entry| entry.uid == number),
        Err(_) => entries(all).find(|entry| entry.name == user),
    };
    let uid = match (&entry, user.parse()) {
        (Some(entry), _) => entry.uid,
        (None, Ok(number)) => number,
        (None, Err(_)) => {
            let text = format!("--user: there is no user '{shown}' in /etc/passwd");
            return Err(usage(text).hint("give its number and its group: `id NAME` shows both"));
        }
    };
    let gid = match (group, &entry) {
        (Some(group), _) => sockets::group(group).map_err(|failure| failure.context("--user"))?,
        (None, Some(entry)) => entry.gid,
        (None, None) => {
            let text = format!("--user: which group user {shown} has is not in /etc/passwd");
            return Err(usage(text).hint(format!("name it: --user {shown}:GROUP")));
        }
    };
    if uid == 0 {
        return Ok(None);
    }
    let found = User::new(uid, gid);
    let found = found.ok_or_else(|| usage(format!("--user: '{shown}' can be no user's number")))?;
    Ok(Some(Identity { user: found, name: entry.map(|entry| entry.name) }))
}

/// The number of a user.
///
/// * `option`: for the message.
///
/// Errors: nobody in `/etc/passwd` is called so.
pub fn number_of(option: &str, user: &str) -> Result<u32, Failure> {
    if let Ok(number) = user.parse() {
        return Ok(number);
    }
    let found = entries(&passwd()).find(|entry| entry.name == user).map(|entry| entry.uid);
    found.ok_or_else(|| {
        let text = format!("{option}: there is no user '{}' in /etc/passwd", visible(user));
        Failure::new(Exit::Usage, text).hint("give its number: `id NAME` shows it")
    })
}

/// The numbers of the users that are members of a group, by `/etc/group` and `/etc/passwd`.
#[must_use]
pub fn members_of(group: u32) -> Vec<u32> {
    members_in(&passwd(), &fs::read_to_string("/etc/group").unwrap_or_default(), group)
}

/// Source: group(5): name, password, number and members (between commas) between colons.
fn members_in(users: &str, groups: &str, group: u32) -> Vec<u32> {
    let members = groups.lines().filter_map(|line| {
        let mut fields = line.split(':').skip(2);
        (fields.next()?.parse() == Ok(group)).then(|| fields.next().unwrap_or_default())
    });
    let names: Vec<&str> = members.flat_map(|list| list.split(',')).collect();
    let is_member = |entry: &Entry| entry.gid == group || names.contains(&entry.name.as_str());
    entries(users).filter(is_member).map(|entry| entry.uid).collect()
}

/// The owner of a file, who is not root.
///
/// Errors: why nobody can become him, for people.
pub(crate) fn owner(uid: u32, gid: u32) -> Result<Identity, String> {
    owner_in(&passwd(), uid, gid)
}

fn owner_in(all: &str, uid: u32, gid: u32) -> Result<Identity, String> {
    let entry = entries(all).find(|entry| entry.uid == uid);
    let group = match &entry {
        Some(entry) => entry.gid,
        // One of root's own groups would be more than the owner has.
        None if gid == 0 => return Err(format!("which group user {uid} has is not known")),
        None => gid,
    };
    let user = User::new(uid, group).ok_or_else(|| format!("{uid} can be no user's number"))?;
    Ok(Identity { user, name: entry.map(|entry| entry.name) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: &str = "root:x:0:0:root:/root:/bin/sh\nqemu:x:64055:108::/:/bin/false\n\
                       broken:x:y:1::/:\ntoor:x:0:0::/:\nagain:x:64055:7::/:\n\
                       end:x:4294967295:1::/:";

    fn found(user: &str, group: Option<&str>) -> String {
        match find_in(ALL, user, group) {
            Ok(found) => found.map_or_else(|| String::from("root"), |found| found.to_string()),
            Err(failure) => {
                assert_eq!(failure.exit, Exit::Usage);
                failure.message().to_owned()
            }
        }
    }

    #[test]
    fn members_are_those_of_both_files() {
        let users = "a:x:1:10::/:\nb:x:2:20::/:\nc:x:3:30::/:\n";
        let groups = "one:x:10:\ntwo:x:20:c,nobody\nthree:x:200:a\n";
        assert_eq!(members_in(users, groups, 10), [1]);
        assert_eq!(members_in(users, groups, 20), [2, 3]);
        assert!(members_in(users, groups, 99).is_empty());
    }

    #[test]
    fn users_are_found_by_name_and_number() {
        assert_eq!(found("qemu", None), "qemu (64055:108)");
        assert_eq!(found("64055", None), "qemu (64055:108)");
        assert_eq!(found("64055", Some("5")), "qemu (64055:5)");
        assert_eq!(found("77", Some("88")), "77:88");
        assert_eq!(found("toor", None), "root");
    }

    #[test]
    fn those_that_are_not_there_are_told_with_what_helps() {
        assert!(found("nobody-here", None).contains("no user 'nobody-here'"));
        assert!(found("broken", None).contains("no user 'broken'"));
        assert!(found("77", None).contains("which group"));
        assert!(found("qemu", Some("no-such-group")).contains("no-such-group"));
        for (user, group) in [("end", None), ("4294967295", Some("1")), ("7", Some("4294967295"))] {
            assert!(found(user, group).contains("no user's number"), "{user}");
        }
    }

    #[test]
    fn an_owner_has_his_first_group_or_that_of_the_file() {
        let shown = |uid, gid| owner_in(ALL, uid, gid).map(|owner| owner.to_string());
        assert_eq!(shown(64055, 0).as_deref(), Ok("qemu (64055:108)"));
        assert_eq!(shown(77, 88).as_deref(), Ok("77:88"));
        assert!(shown(77, 0).expect_err("root's group").contains("user 77"));
    }
}
