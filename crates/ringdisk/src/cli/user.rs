//! The words of `--user`.

use std::str::FromStr;

use clap::Args;

/// Which user a process serves as.
#[derive(Args, Clone, Debug)]
pub(crate) struct UserArgs {
    /// Serve as this user, once everything that takes root is done: auto (the owner of the image,
    /// where that does), root, or a name or number
    ///
    /// For root only. All threads become that user, with its first group or GROUP and no other, and
    /// keep no capability. auto does so where the owner of the image on top is not root and may
    /// open all images of the disk (of all disks of the process) again as they are open, and not
    /// with --sandbox off; the log (-v) and `ringdisk ctl ... stats` say why the process stays
    /// root. A command that the user may not carry out (an overlay in a directory of root, a commit
    /// into another one's image) fails; `--user root` serves as before. From then on the user's
    /// quota counts, and the user may send signals to the process.
    #[arg(
        id = "user",
        long = "user",
        value_name = "USER[:GROUP]",
        default_value = "auto",
        help_heading = "Serving options"
    )]
    pub(crate) word: UserWord,
}

/// What `--user` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UserWord {
    /// The owner of the image, where that does.
    Auto,
    /// No other than now.
    Root,
    /// A name or a number, and perhaps one of a group.
    Is { user: String, group: Option<String> },
}

impl FromStr for UserWord {
    type Err = String;

    fn from_str(text: &str) -> Result<UserWord, String> {
        let (user, group) = match text.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (text, None),
        };
        let is_root = user == "root" || user.parse() == Ok(0);
        match (user, group) {
            ("", _) | (_, Some("")) => {
                Err(String::from("write auto, root, USER or USER:GROUP, names or numbers"))
            }
            ("auto", Some(_)) => Err(String::from("auto finds the group by itself")),
            (_, Some(_)) if is_root => Err(String::from("root stays what it is, with its groups")),
            ("auto", None) => Ok(UserWord::Auto),
            (_, None) if is_root => Ok(UserWord::Root),
            _ => Ok(UserWord::Is { user: user.to_owned(), group: group.map(str::to_owned) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_groups_are_told_apart_from_the_two_words() {
        let is = |user: &str, group: Option<&str>| {
            Ok(UserWord::Is { user: user.to_owned(), group: group.map(str::to_owned) })
        };
        assert_eq!("auto".parse(), Ok(UserWord::Auto));
        assert_eq!("root".parse(), Ok(UserWord::Root));
        assert_eq!("0".parse(), Ok(UserWord::Root));
        assert_eq!("qemu".parse(), is("qemu", None));
        assert_eq!("64055:kvm".parse(), is("64055", Some("kvm")));
        for bad in ["", ":", "qemu:", ":kvm", "auto:kvm", "root:kvm", "0:0"] {
            assert!(bad.parse::<UserWord>().is_err(), "{bad}");
        }
    }
}
