//! This program under the name `mount.fuse.ringdisk`: a line of fstab, or `mount -t fuse.ringdisk`.
//!
//! Promises: options of mount(8) that mean nothing here are left out; every other one is the long
//! name of an option of `ringdisk mount`. The mount answers when the command returns.

use std::ffi::{OsStr, OsString};
use std::path::Path;

/// The names under which mount(8) starts it.
const NAMES: [&str; 2] = ["mount.fuse.ringdisk", "mount.ringdisk"];

/// Options that are mount(8)'s own, or that say how other file systems are mounted.
const IGNORED: [&str; 26] = [
    "defaults",
    "rw",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "nofail",
    "_netdev",
    "exec",
    "noexec",
    "suid",
    "nosuid",
    "dev",
    "nodev",
    "atime",
    "noatime",
    "diratime",
    "nodiratime",
    "relatime",
    "norelatime",
    "strictatime",
    "async",
    "nostrictatime",
];

/// Whether mount(8) has started this program.
pub(crate) fn is_named_so(program: &OsStr) -> bool {
    Path::new(program).file_name().is_some_and(|name| NAMES.iter().any(|own| name == *own))
}

/// The words of `ringdisk mount` for those of mount(8): `SOURCE TARGET [-sfnv] [-o OPTIONS]`.
///
/// Errors: what is wrong with them.
pub(crate) fn words(given: impl IntoIterator<Item = OsString>) -> Result<Vec<OsString>, String> {
    let mut out: Vec<OsString> = ["ringdisk", "mount", "--daemonize"].map(OsString::from).to_vec();
    let mut places = Vec::new();
    let mut given = given.into_iter();
    while let Some(word) = given.next() {
        let options = match word.to_str() {
            Some("-o") => given.next().ok_or("-o needs options")?,
            Some("-t" | "-N") => {
                given.next().ok_or("an option lacks its value")?;
                continue;
            }
            Some(text) if text.starts_with("-o") => OsString::from(&text[2..]),
            // Sloppy, fake, no mtab, verbose: nothing that changes what is mounted.
            Some("-s" | "-n" | "-v" | "-w" | "-sn" | "-nv") => continue,
            Some("-f") => return Ok(Vec::new()),
            Some("-r") => OsString::from("ro"),
            Some(text) if text.starts_with('-') => {
                return Err(format!("unknown option '{}'", text.escape_debug()));
            }
            _ => {
                places.push(word);
                continue;
            }
        };
        let options = options.into_string().map_err(|_| "options are not UTF-8")?;
        out.extend(options.split(',').filter_map(option));
    }
    if places.len() != 2 {
        return Err(String::from("an image and the file to serve it as are needed"));
    }
    out.extend([OsString::from("--")]);
    out.extend(places);
    Ok(out)
}

/// One option as a word; `None`: it is left out.
fn option(text: &str) -> Option<OsString> {
    let is_note = |text: &str| {
        ["x-", "X-", "comment=", "helper=", "uhelper=", "fsname=", "subtype="]
            .iter()
            .any(|start| text.starts_with(start))
    };
    if text.is_empty() || IGNORED.contains(&text) || is_note(text) {
        return None;
    }
    if text == "ro" {
        return Some(OsString::from("--read-only"));
    }
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (text, None),
    };
    let name = name.replace('_', "-");
    Some(OsString::from(match value {
        Some(value) => format!("--{name}={value}"),
        None => format!("--{name}"),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(given: &[&str]) -> Result<Vec<String>, String> {
        let words = words(given.iter().map(OsString::from))?;
        Ok(words.into_iter().map(|word| word.into_string().expect("UTF-8")).collect())
    }

    #[test]
    fn a_line_of_fstab_is_a_command_line() {
        let found = read(&["/a.qcow2", "/srv/a", "-o", "rw,nofail,allow_other,cache=none,x-a=b"]);
        let expected = ["ringdisk", "mount", "--daemonize", "--allow-other", "--cache=none", "--"];
        assert_eq!(
            found,
            Ok([&expected[..], &["/a.qcow2", "/srv/a"]]
                .concat()
                .iter()
                .map(|w| (*w).to_owned())
                .collect())
        );
        let found = read(&["-n", "/a", "/b", "-oro,limit=iops=5,limit=bps=1M"]).expect("good");
        assert_eq!(found[3..6], ["--read-only", "--limit=iops=5", "--limit=bps=1M"]);
        assert_eq!(read(&["/a", "/b", "-f"]), Ok(Vec::new()));
        assert!(read(&["/a"]).is_err() && read(&["/a", "/b", "-x"]).is_err());
        assert!(read(&["/a", "/b", "-o"]).is_err());
    }

    #[test]
    fn it_is_known_by_its_name() {
        assert!(is_named_so(OsStr::new("/sbin/mount.fuse.ringdisk")));
        assert!(!is_named_so(OsStr::new("/usr/bin/ringdisk")));
    }
}
