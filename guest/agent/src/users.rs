//! Users and groups, read from `/etc/passwd` and `/etc/group`. A static binary has no name service, and images rarely
//! have more than these files.

use std::{collections::HashMap, fs, path::PathBuf};

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";

/// Largest of the two files that is read: they are a guest's, and lookups happen per request.
const MAX_FILE: u64 = 1 << 20;

/// A user that processes can run as and files can belong to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) home: PathBuf,
    /// Supplementary groups, `gid` among them.
    pub(crate) groups: Vec<u32>,
}

#[derive(Debug, thiserror::Error)]
#[error("invalid username: '{0}'")]
pub(crate) struct UnknownUser(pub(crate) String);

/// Looks a user up by name; by number too, because an image's USER may be one that has no entry.
pub(crate) fn lookup(name: &str) -> Result<User, UnknownUser> {
    find(&read(PASSWD), &read(GROUP), name).ok_or_else(|| UnknownUser(name.to_owned()))
}

fn read(path: &str) -> String {
    match fs::metadata(path) {
        Ok(meta) if meta.len() <= MAX_FILE => {
            fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
        }
        _ => String::new(),
    }
}

fn find(passwd: &str, group: &str, wanted: &str) -> Option<User> {
    // Docker's `uid:gid` form.
    let (wanted, wanted_gid) = match wanted.split_once(':') {
        Some((user, gid)) => (user, Some(gid.parse::<u32>().ok()?)),
        None => (wanted, None),
    };
    let number = wanted.parse::<u32>().ok();
    let named = passwd.lines().filter_map(entry).find(|user| user.name == wanted);
    let mut user = match (named, number) {
        (Some(user), _) => user,
        (None, Some(uid)) => {
            passwd.lines().filter_map(entry).find(|user| user.uid == uid).unwrap_or_else(|| User {
                name: uid.to_string(),
                uid,
                gid: if uid == 0 { 0 } else { uid },
                home: PathBuf::from("/"),
                groups: Vec::new(),
            })
        }
        (None, None) => return None,
    };
    if let Some(gid) = wanted_gid {
        user.gid = gid;
    }
    user.groups = vec![user.gid];
    for line in group.lines() {
        let mut fields = line.split(':');
        let (Some(_), Some(_), Some(gid), Some(members)) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let Ok(gid) = gid.parse() else { continue };
        if members.split(',').any(|member| member.trim() == user.name) && !user.groups.contains(&gid) {
            user.groups.push(gid);
        }
    }
    Some(user)
}

fn entry(line: &str) -> Option<User> {
    let fields: Vec<&str> = line.split(':').collect();
    let [name, _, uid, gid, _, home, ..] = fields.as_slice() else { return None };
    if name.is_empty() || name.starts_with('#') {
        return None;
    }
    let home = if home.is_empty() { "/" } else { home };
    Some(User {
        name: (*name).to_owned(),
        uid: uid.parse().ok()?,
        gid: gid.parse().ok()?,
        home: PathBuf::from(home),
        groups: Vec::new(),
    })
}

/// Names of ids, read once per listing.
pub(crate) struct Names {
    users: HashMap<u32, String>,
    groups: HashMap<u32, String>,
}

impl Names {
    pub(crate) fn read() -> Self {
        let mut users = HashMap::new();
        for user in read(PASSWD).lines().filter_map(entry) {
            users.entry(user.uid).or_insert(user.name);
        }
        let mut groups = HashMap::new();
        for line in read(GROUP).lines() {
            let mut fields = line.split(':');
            let (Some(name), _, Some(gid)) = (fields.next(), fields.next(), fields.next()) else { continue };
            if let Ok(gid) = gid.parse() {
                groups.entry(gid).or_insert_with(|| name.to_owned());
            }
        }
        Self { users, groups }
    }

    /// The user's name, or the number when it has none.
    pub(crate) fn user(&self, uid: u32) -> String {
        self.users.get(&uid).cloned().unwrap_or_else(|| uid.to_string())
    }

    /// The group's name, or the number when it has none.
    pub(crate) fn group(&self, gid: u32) -> String {
        self.groups.get(&gid).cloned().unwrap_or_else(|| gid.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USERS: &str =
        "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\nbroken:x:one:1::/:\n";
    const GROUPS: &str = "root:x:0:\nsudo:x:27:user,other\nuser:x:1000:\nbad\n";

    #[test]
    fn a_user_has_its_own_and_its_supplementary_groups() {
        let user = find(USERS, GROUPS, "user").expect("user is there");
        assert_eq!((user.uid, user.gid), (1000, 1000));
        assert_eq!(user.groups, [1000, 27]);
        assert_eq!(user.home, PathBuf::from("/home/user"));
    }

    #[test]
    fn numbers_need_no_entry_but_names_do() {
        assert_eq!(find(USERS, GROUPS, "1000").map(|user| user.name).as_deref(), Some("user"));
        assert_eq!(find(USERS, GROUPS, "4242").map(|user| (user.uid, user.gid)), Some((4242, 4242)));
        assert_eq!(find(USERS, GROUPS, "1000:27").map(|user| user.gid), Some(27));
        assert_eq!(find(USERS, GROUPS, "nobody-here"), None);
        assert_eq!(find(USERS, GROUPS, "broken"), None);
        assert_eq!(find(USERS, GROUPS, ""), None);
    }
}
