//! What `--user` says.
//!
//! Promises: reads words and looks nothing up: whether there is such a user is found out later.

use std::str::FromStr;

/// What `--user` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestedUser {
    /// The owner of the image, where that does.
    Auto,
    /// No other than now.
    Root,
    /// A name or a number, and perhaps one of a group.
    Is {
        /// Name or number of the user.
        user: String,
        /// Name or number of the group; `None`: the first one of the user.
        group: Option<String>,
    },
}

impl FromStr for RequestedUser {
    type Err = String;

    fn from_str(text: &str) -> Result<RequestedUser, String> {
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
            ("auto", None) => Ok(RequestedUser::Auto),
            (_, None) if is_root => Ok(RequestedUser::Root),
            _ => Ok(RequestedUser::Is { user: user.to_owned(), group: group.map(str::to_owned) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_groups_are_told_apart_from_the_two_words() {
        let is = |user: &str, group: Option<&str>| {
            Ok(RequestedUser::Is { user: user.to_owned(), group: group.map(str::to_owned) })
        };
        assert_eq!("auto".parse(), Ok(RequestedUser::Auto));
        assert_eq!("root".parse(), Ok(RequestedUser::Root));
        assert_eq!("0".parse(), Ok(RequestedUser::Root));
        assert_eq!("qemu".parse(), is("qemu", None));
        assert_eq!("64055:kvm".parse(), is("64055", Some("kvm")));
        for bad in ["", ":", "qemu:", ":kvm", "auto:kvm", "root:kvm", "0:0"] {
            assert!(bad.parse::<RequestedUser>().is_err(), "{bad}");
        }
    }
}
